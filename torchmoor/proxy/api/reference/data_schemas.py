"""JSON schemas of the bodies of the data plane's APIs, except OpenAI's."""

from __future__ import annotations

from torchmoor.proxy.api.reference.common_schemas import (
    COUNT,
    FLAG,
    OBJECT,
    OBJECTS,
    PLAIN_ERROR,
    TEXT,
    TEXT_LIST,
    Schema,
    array,
    record,
)
from torchmoor.wire import sampling_parameters

# SageMaker's runtime API, and the reference
FRAMES: Schema = {"type": "string", "format": "binary", "description": "Frames with PayloadParts."}
QUEUED = record(("InferenceId",), InferenceId=TEXT)
ENDPOINT = record(
    ("EndpointName", "EndpointStatus", "ProductionVariants"),
    EndpointName=TEXT,
    EndpointStatus=TEXT,
    ProductionVariants=array(record(("VariantName",), VariantName=TEXT)),
)
DOCUMENT = record(("openapi", "info", "paths"), openapi=TEXT, info=OBJECT, paths=OBJECT)
RUNTIME_ERROR = record(Message=TEXT, message=TEXT)

# The API of SageMaker's containers
LOADED_MODELS = record(("models",), models=OBJECTS)
LOADED_MODEL = record(("modelName", "modelUrl"), modelName=TEXT, modelUrl=TEXT)
LOAD_MODEL = record(("model_name", "url"), model_name=TEXT, url=TEXT)
CONTAINER_ERROR: Schema = {
    "anyOf": [PLAIN_ERROR, record(("Message",), Message=TEXT)],
    "description": "The second form is that of a path or a method that the port does not serve.",
}

# The Open Inference Protocol
SERVER = record(("name", "version", "extensions"), name=TEXT, version=TEXT, extensions=TEXT_LIST)
LIVE = record(("live",), live=FLAG)
READY = record(("ready",), ready=FLAG)
_SHAPE: Schema = array({"type": "integer"})
_TENSOR = record(("name", "datatype", "shape"), name=TEXT, datatype=TEXT, shape=_SHAPE)
_TENSOR_LIST: Schema = array(_TENSOR)
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
    inputs=array(record(("name", "shape", "datatype"), name=TEXT, shape={"type": "array"}, datatype=TEXT)),
    outputs=array(record(("name",), name=TEXT)),
)
TENSORS_ANSWER = record(
    ("model_name", "model_version", "outputs"), model_name=TEXT, model_version=TEXT, outputs=_TENSOR_LIST, id=TEXT
)

# TGI's routes
GENERATE = record(
    ("inputs",),
    inputs=TEXT,
    parameters=record(
        **{name: row.schema for name, row in sampling_parameters.SAMPLING_NUMBERS.items()},
        do_sample=FLAG,
        logit_bias={"type": "object", "additionalProperties": sampling_parameters.LOGIT_BIAS.schema},
        top_n_tokens=sampling_parameters.TOP_TOKENS.schema,
        max_new_tokens=COUNT,
        truncate=COUNT,
        stop=TEXT_LIST,
        ignore_eos=FLAG,
        return_full_text=FLAG,
        details=FLAG,
        grammar=record(("type", "value"), type={"enum": ["json", "json_schema", "regex", "lark"]}, value={}),
    ),
)
GENERATED = record(("generated_text",), generated_text=TEXT, details=OBJECT)
TGI_EVENTS: Schema = {
    "description": "Server-sent events `data:{index, token, generated_text, details}`."
}  # see common_schemas.EVENTS
INFO = record(("model_id", "router", "version"), model_id=TEXT, router=TEXT, version=TEXT)
_ERROR_TYPES = ["validation", "overloaded", "generation", "healthcheck"]
TGI_ERROR: Schema = {
    "anyOf": [
        record(("error", "error_type"), error=TEXT, error_type={"enum": _ERROR_TYPES}),
        record(("message",), message=TEXT),
        record(("Message",), Message=TEXT),
    ],
    "description": "The second form is that of a request without valid credentials, the third that of one that is not "
    "valid HTTP.",
}
