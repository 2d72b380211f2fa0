"""JSON schemas of the bodies of the API of SageMaker's containers."""

from __future__ import annotations

from torchmoor.proxy.api.reference.common_schemas import OBJECTS, PLAIN_ERROR, TEXT, Schema, record

LOADED_MODELS = record(("models",), models=OBJECTS)
LOADED_MODEL = record(("modelName", "modelUrl"), modelName=TEXT, modelUrl=TEXT)
LOAD_MODEL = record(("model_name", "url"), model_name=TEXT, url=TEXT)
ERROR: Schema = {
    "anyOf": [PLAIN_ERROR, record(("Message",), Message=TEXT)],
    "description": "The second form is that of a path or a method that the port does not serve.",
}
