"""JSON schemas of the bodies of the Open Inference Protocol."""

from __future__ import annotations

from torchmoor.proxy.api.reference.common_schemas import FLAG, TEXT, TEXT_LIST, Schema, record

SERVER = record(("name", "version", "extensions"), name=TEXT, version=TEXT, extensions=TEXT_LIST)
LIVE = record(("live",), live=FLAG)
READY = record(("ready",), ready=FLAG)
_SHAPE: Schema = {"type": "array", "items": {"type": "integer"}}
_TENSOR = record(("name", "datatype", "shape"), name=TEXT, datatype=TEXT, shape=_SHAPE)
_TENSOR_LIST: Schema = {"type": "array", "items": _TENSOR}
MODEL_METADATA = record(
    ("name", "versions", "platform", "inputs", "outputs"),
    name=TEXT,
    versions=TEXT_LIST,
    platform=TEXT,
    inputs=_TENSOR_LIST,
    outputs=_TENSOR_LIST,
)
MODEL_READY = record(("name", "ready"), name=TEXT, ready=FLAG)
TENSORS = record(
    ("inputs",),
    id=TEXT,
    inputs={
        "type": "array",
        "items": record(("name", "shape", "datatype"), name=TEXT, shape={"type": "array"}, datatype=TEXT),
    },
    outputs={"type": "array", "items": record(("name",), name=TEXT)},
)
TENSORS_ANSWER = record(
    ("model_name", "model_version", "outputs"), model_name=TEXT, model_version=TEXT, outputs=_TENSOR_LIST, id=TEXT
)
