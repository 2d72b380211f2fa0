"""JSON schemas of the bodies of TGI's routes."""

from __future__ import annotations

from torchmoor.proxy.api.reference.common_schemas import COUNT, FLAG, TEXT, Schema, record
from torchmoor.wire import sampling_parameters

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
        stop={"type": "array", "items": TEXT},
        ignore_eos=FLAG,
        return_full_text=FLAG,
        details=FLAG,
        grammar=record(("type", "value"), type={"enum": ["json", "json_schema", "regex", "lark"]}, value={}),
    ),
)
GENERATED = record(("generated_text",), generated_text=TEXT, details={"type": "object"})
EVENTS: Schema = {
    "description": "Server-sent events `data:{index, token, generated_text, details}`."
}  # see common_schemas.EVENTS
INFO = record(("model_id", "router", "version"), model_id=TEXT, router=TEXT, version=TEXT)
_ERROR_TYPES = ["validation", "overloaded", "generation", "healthcheck"]
ERROR: Schema = {
    "anyOf": [
        record(("error", "error_type"), error=TEXT, error_type={"enum": _ERROR_TYPES}),
        record(("message",), message=TEXT),
        record(("Message",), Message=TEXT),
    ],
    "description": "The second form is that of a request without valid credentials, the third that of one that is not "
    "valid HTTP.",
}
