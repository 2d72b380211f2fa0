"""JSON schemas of the bodies of OpenAI's resources: responses, conversations, items and files."""

from __future__ import annotations

from torchmoor.proxy.api.reference.common_schemas import (
    COUNT,
    FLAG,
    LABELS,
    NATURAL,
    NUMBER,
    OBJECT,
    OBJECTS,
    TEXT,
    TEXT_LIST,
    Schema,
    array,
    or_null,
    record,
)
from torchmoor.proxy.api.reference.openai_schemas import (
    AFFINITY,
    FOR_TEMPLATE,
    FUNCTION,
    REASONING,
    SAMPLING,
    TOP_LOGPROBS,
)

ITEM = record(("id", "type"), id=TEXT, type=TEXT)
DELETED = record(("id", "object", "deleted"), id=TEXT, object=TEXT, deleted={"const": True})


def page(item: Schema) -> Schema:
    """Return the schema of a page of a list."""
    return record(
        ("object", "data", "first_id", "last_id", "has_more"),
        object={"const": "list"},
        data=array(item),
        first_id=or_null(TEXT),
        last_id=or_null(TEXT),
        has_more=FLAG,
    )


_TYPE: Schema = {**TEXT, "description": "function, custom, or namespace with these; others are not offered"}
_RESPONSE_TOOL = record(("type",), type=_TYPE, tools=OBJECTS, format=OBJECT, **FUNCTION["properties"])
RESPONSE = record(
    ("model",),
    model=TEXT,
    input={"oneOf": [TEXT, OBJECTS]},
    instructions=TEXT,
    previous_response_id=TEXT,
    conversation={"oneOf": [TEXT, record(("id",), id=TEXT)]},
    max_output_tokens=COUNT,
    background=FLAG,
    generate=FLAG,
    store=FLAG,
    stream=FLAG,
    text=OBJECT,
    truncation={"enum": ["auto", "disabled"]},
    include=TEXT_LIST,
    top_logprobs=TOP_LOGPROBS,
    reasoning=REASONING,
    metadata=LABELS,
    **{**FOR_TEMPLATE, "tools": array(_RESPONSE_TOOL)},
    **SAMPLING,
    **AFFINITY,
)
RESPONSE_ANSWER = record(
    ("id", "object", "created_at", "status", "model", "output", "usage"),
    id=TEXT,
    object={"const": "response"},
    created_at=NATURAL,
    completed_at=or_null(NATURAL),
    status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    background=FLAG,
    conversation=or_null(record(("id",), id=TEXT)),
    error=or_null(record(("code", "message"), code=TEXT, message=TEXT)),
    frequency_penalty=NUMBER,
    incomplete_details=or_null(record(("reason",), reason=TEXT)),
    instructions=or_null(TEXT),
    max_output_tokens=or_null(NATURAL),
    max_tool_calls=or_null(COUNT),
    metadata=LABELS,
    model=TEXT,
    output=array(ITEM),
    parallel_tool_calls=FLAG,
    presence_penalty=NUMBER,
    previous_response_id=or_null(TEXT),
    prompt_cache_key=or_null(TEXT),
    reasoning=record(effort=or_null(TEXT), summary=or_null(TEXT)),
    safety_identifier=or_null(TEXT),
    service_tier=TEXT,
    store=FLAG,
    temperature=NUMBER,
    text=OBJECT,
    tool_choice=FOR_TEMPLATE["tool_choice"],
    tools=OBJECTS,
    top_logprobs=NATURAL,
    top_p=NUMBER,
    truncation={"enum": ["auto", "disabled"]},
    usage=or_null(OBJECT),
    user=or_null(TEXT),
)
COMPACTION = record(
    ("id", "object", "created_at", "output", "usage"),
    id=TEXT,
    object={"const": "response.compaction"},
    created_at=NATURAL,
    output=array(ITEM),
    usage=OBJECT,
)
INPUT_TOKENS = record(("object", "input_tokens"), object={"const": "response.input_tokens"}, input_tokens=NATURAL)

CONVERSATION = record(items=array(OBJECT, maxItems=20), metadata=LABELS)
CONVERSATION_ANSWER = record(
    ("id", "object", "created_at", "metadata", "expires_at"),
    id=TEXT,
    object={"const": "conversation"},
    created_at=NATURAL,
    metadata=LABELS,
    expires_at=NATURAL,
)
ITEMS = record(("items",), items=array(OBJECT, minItems=1, maxItems=20))
METADATA = record(("metadata",), metadata=LABELS)

FILE_CONTENT: Schema = {"type": "string", "format": "binary"}
_LIFETIME: Schema = {  # form fields, in the form of OpenAI's clients
    "expires_after[anchor]": {"const": "created_at"},
    "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
}
FILE = record(("file", "purpose"), file=FILE_CONTENT, purpose={"enum": ["vision", "user_data"]}, **_LIFETIME)
FILE_ANSWER = record(
    ("id", "object", "bytes", "created_at", "filename", "purpose", "status", "expires_at"),
    id=TEXT,
    object={"const": "file"},
    bytes=NATURAL,
    created_at=NATURAL,
    filename=TEXT,
    purpose=TEXT,
    status=TEXT,
    expires_at=NATURAL,
)
