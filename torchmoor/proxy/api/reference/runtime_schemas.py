"""JSON schemas of the bodies of SageMaker's runtime API, and of the reference."""

from __future__ import annotations

from torchmoor.proxy.api.reference.common_schemas import OBJECT, TEXT, Schema, record

FRAMES: Schema = {"type": "string", "format": "binary", "description": "Frames with PayloadParts."}
QUEUED = record(("InferenceId",), InferenceId=TEXT)
ENDPOINT = record(
    ("EndpointName", "EndpointStatus", "ProductionVariants"),
    EndpointName=TEXT,
    EndpointStatus=TEXT,
    ProductionVariants={"type": "array", "items": record(("VariantName",), VariantName=TEXT)},
)
DOCUMENT = record(("openapi", "info", "paths"), openapi=TEXT, info=OBJECT, paths=OBJECT)
ERROR = record(Message=TEXT, message=TEXT)
