"""JSON schemas that several APIs share, and short forms to write one."""

from __future__ import annotations

from typing import Any

from torchmoor.wire import sampling_parameters

Schema = dict[str, Any]


def array(items: Schema, **limits: int) -> Schema:
    """Return the schema of a list. limits: minItems, maxItems."""
    return {"type": "array", "items": items, **limits}


EMPTY: Schema = {}
JSON_VALUE: Schema = {"description": "Any JSON value: the model's own form."}
# Without a type: readers of the document differ in whether a schema describes the stream or each of its events.
EVENTS: Schema = {"description": "Server-sent events."}
ANY_FORM: Schema = {"description": "The model's own form."}
TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"oneOf": [TEXT, array(TEXT, minItems=1)]}
COUNT: Schema = sampling_parameters.COUNT.schema
FLAG: Schema = {"type": "boolean"}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
NATURAL: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
OBJECT: Schema = {"type": "object"}
OBJECTS: Schema = array(OBJECT)
TEXT_LIST: Schema = array(TEXT)


def record(required: tuple[str, ...] = (), /, **fields: Schema) -> Schema:
    """Return the schema of an object."""
    made: Schema = {"type": "object", "properties": fields}
    return {**made, "required": list(required)} if required else made


def or_null(schema: Schema) -> Schema:
    return {"oneOf": [schema, {"type": "null"}]}


_MESSAGE_OR_OBJECT = {"description": "A message, or an object with code and message."}
PLAIN_ERROR = record(("error",), error=_MESSAGE_OR_OBJECT)
