"""JSON schemas of bodies that the reference describes."""

from __future__ import annotations

from typing import Any

from torchmoor.wire import sampling_parameters

Schema = dict[str, Any]

EMPTY: Schema = {}
JSON_VALUE: Schema = {"description": "Any JSON value: the model's own form."}
ANY_FORM: Schema = {"description": "The model's own form."}
FRAMES: Schema = {"type": "string", "format": "binary", "description": "Frames with PayloadParts."}
TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"oneOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}]}
COUNT: Schema = sampling_parameters.COUNT.schema
FLAG: Schema = {"type": "boolean"}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}


def record(required: tuple[str, ...] = (), /, **fields: Schema) -> Schema:
    """Return the schema of an object."""
    made: Schema = {"type": "object", "properties": fields}
    return {**made, "required": list(required)} if required else made


_CONTENT: Schema = {"oneOf": [TEXT, {"type": "array", "items": {"type": "object"}, "minItems": 1}]}
_FUNCTION = record(("name",), name=TEXT, description=TEXT, parameters={"type": "object"}, strict=FLAG)
_CALL = record(
    ("id", "type", "function"),
    id=TEXT,
    type={"const": "function"},
    function=record(("name", "arguments"), name=TEXT, arguments=TEXT),
)
_MESSAGE = record(
    ("role",),
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content={"oneOf": [*_CONTENT["oneOf"], {"type": "null"}]},
    tool_calls={"type": "array", "items": _CALL},
    tool_call_id=TEXT,
    reasoning_content=TEXT,
)
_FOR_TEMPLATE: dict[str, Schema] = {
    "tools": {"type": "array", "items": record(("type", "function"), type={"const": "function"}, function=_FUNCTION)},
    "tool_choice": {"oneOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
    "parallel_tool_calls": FLAG,
    "chat_template_kwargs": {"type": "object", "maxProperties": 16},
}
_EFFORT: Schema = {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]}
_REASONING = record(effort=_EFFORT, summary={"enum": ["auto", "concise", "detailed"]})
_RESPONSE_TOOL = record(("type", "name"), type={"const": "function"}, **_FUNCTION["properties"])
_SAMPLING: dict[str, Schema] = {
    **{name: row.schema for name, row in sampling_parameters.SAMPLING_NUMBERS.items() if row.is_openai},
    "ignore_eos": FLAG,
    "stop": TEXTS,
}
_LOGIT_BIAS: Schema = {"type": "object", "additionalProperties": sampling_parameters.LOGIT_BIAS.schema}
_TOP_LOGPROBS: Schema = sampling_parameters.TOP_TOKENS.schema
_AFFINITY: dict[str, Schema] = {"prompt_cache_key": TEXT, "safety_identifier": TEXT, "user": TEXT}

CHAT = record(
    ("model", "messages"),
    model=TEXT,
    messages={"type": "array", "items": _MESSAGE, "minItems": 1},
    max_completion_tokens=COUNT,
    max_tokens=COUNT,
    n=COUNT,
    logit_bias=_LOGIT_BIAS,
    stream=FLAG,
    stream_options=record(include_usage=FLAG),
    logprobs=FLAG,
    top_logprobs=_TOP_LOGPROBS,
    response_format={"type": "object"},
    reasoning=_REASONING,
    reasoning_effort=_EFFORT,
    metadata=LABELS,
    **_FOR_TEMPLATE,
    **_SAMPLING,
    **_AFFINITY,
)
COMPLETION = record(
    ("model", "prompt"),
    model=TEXT,
    prompt=TEXTS,
    max_tokens=COUNT,
    n=COUNT,
    logit_bias=_LOGIT_BIAS,
    stream=FLAG,
    stream_options=record(include_usage=FLAG),
    logprobs=_TOP_LOGPROBS,
    **_SAMPLING,
    **_AFFINITY,
)
RESPONSE = record(
    ("model",),
    model=TEXT,
    input={"oneOf": [TEXT, {"type": "array", "items": {"type": "object"}}]},
    instructions=TEXT,
    previous_response_id=TEXT,
    conversation={"oneOf": [TEXT, record(("id",), id=TEXT)]},
    max_output_tokens=COUNT,
    background=FLAG,
    store=FLAG,
    stream=FLAG,
    text={"type": "object"},
    truncation={"enum": ["auto", "disabled"]},
    include={"type": "array", "items": TEXT},
    top_logprobs=_TOP_LOGPROBS,
    reasoning=_REASONING,
    metadata=LABELS,
    **{**_FOR_TEMPLATE, "tools": {"type": "array", "items": _RESPONSE_TOOL}},
    **_SAMPLING,
    **_AFFINITY,
)

_NATURAL: Schema = {"type": "integer", "minimum": 0}


def _or_null(schema: Schema) -> Schema:
    return {"oneOf": [schema, {"type": "null"}]}


def _completion(kind: str, **choice: Schema) -> Schema:
    """Return the schema of a whole answer with choices, of which each has these fields."""
    ends: Schema = {"enum": ["stop", "length", "tool_calls"]}
    fields = {"index": _NATURAL, "finish_reason": ends, "logprobs": _or_null({"type": "object"}), **choice}
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    return record(
        ("id", "object", "created", "model", "choices", "usage"),
        id=TEXT,
        object={"const": kind},
        created=_NATURAL,
        model=TEXT,
        system_fingerprint=TEXT,
        choices={"type": "array", "items": record(tuple(fields), **fields), "minItems": 1},
        usage=record(counts, **dict.fromkeys(counts, _NATURAL)),
    )


CHAT_ANSWER = _completion(
    "chat.completion",
    message=record(
        ("role", "content"),
        role={"const": "assistant"},
        content=_or_null(TEXT),
        tool_calls={"type": "array", "items": _CALL},
        reasoning_content=TEXT,
    ),
)
COMPLETION_ANSWER = _completion("text_completion", text=TEXT)
_NUMBER: Schema = {"type": "number"}
_OBJECT: Schema = {"type": "object"}
ITEM = record(("id", "type"), id=TEXT, type=TEXT)
RESPONSE_ANSWER = record(
    ("id", "object", "created_at", "status", "model", "output", "usage"),
    id=TEXT,
    object={"const": "response"},
    created_at=_NATURAL,
    completed_at=_or_null(_NATURAL),
    status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    background=FLAG,
    conversation=_or_null(record(("id",), id=TEXT)),
    error=_or_null(record(("code", "message"), code=TEXT, message=TEXT)),
    frequency_penalty=_NUMBER,
    incomplete_details=_or_null(record(("reason",), reason=TEXT)),
    instructions=_or_null(TEXT),
    max_output_tokens=_or_null(_NATURAL),
    max_tool_calls=_or_null(COUNT),
    metadata=LABELS,
    model=TEXT,
    output={"type": "array", "items": ITEM},
    parallel_tool_calls=FLAG,
    presence_penalty=_NUMBER,
    previous_response_id=_or_null(TEXT),
    prompt_cache_key=_or_null(TEXT),
    reasoning=record(effort=_or_null(TEXT), summary=_or_null(TEXT)),
    safety_identifier=_or_null(TEXT),
    service_tier=TEXT,
    store=FLAG,
    temperature=_NUMBER,
    text=_OBJECT,
    tool_choice=_FOR_TEMPLATE["tool_choice"],
    tools={"type": "array", "items": _OBJECT},
    top_logprobs=_NATURAL,
    top_p=_NUMBER,
    truncation={"enum": ["auto", "disabled"]},
    usage=_or_null(_OBJECT),
    user=_or_null(TEXT),
)
DELETED = record(("id", "object", "deleted"), id=TEXT, object=TEXT, deleted={"const": True})
CONVERSATION_ANSWER = record(
    ("id", "object", "created_at", "metadata"),
    id=TEXT,
    object={"const": "conversation"},
    created_at=_NATURAL,
    metadata=LABELS,
)
FILE_ANSWER = record(
    ("id", "object", "bytes", "created_at", "filename", "purpose", "status", "expires_at"),
    id=TEXT,
    object={"const": "file"},
    bytes=_NATURAL,
    created_at=_NATURAL,
    filename=TEXT,
    purpose=TEXT,
    status=TEXT,
    expires_at=_NATURAL,
)
FILE_CONTENT: Schema = {"type": "string", "format": "binary"}
COMPACTION = record(
    ("id", "object", "created_at", "output", "usage"),
    id=TEXT,
    object={"const": "response.compaction"},
    created_at=_NATURAL,
    output={"type": "array", "items": ITEM},
    usage=_OBJECT,
)
INPUT_TOKENS = record(("object", "input_tokens"), object={"const": "response.input_tokens"}, input_tokens=_NATURAL)
TOKENS = record(
    ("count", "max_model_len", "tokens", "token_strs"),
    count=_NATURAL,
    max_model_len=_NATURAL,
    tokens={"type": "array", "items": _NATURAL},
    token_strs=_or_null({"type": "array", "items": TEXT}),
)
PROMPT = record(("prompt",), prompt=TEXT)
MODEL = record(
    ("id", "object", "created", "owned_by", "capabilities"),
    id=TEXT,
    object={"const": "model"},
    created=_NATURAL,
    owned_by=TEXT,
    capabilities={"type": "array", "items": TEXT},
)
MODELS = record(("object", "data"), object={"const": "list"}, data={"type": "array", "items": MODEL})

_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_TEXT_LIST: Schema = {"type": "array", "items": TEXT}
QUEUED = record(("InferenceId",), InferenceId=TEXT)
ENDPOINT = record(
    ("EndpointName", "EndpointStatus", "ProductionVariants"),
    EndpointName=TEXT,
    EndpointStatus=TEXT,
    ProductionVariants={"type": "array", "items": record(("VariantName",), VariantName=TEXT)},
)
SERVER = record(("name", "version", "extensions"), name=TEXT, version=TEXT, extensions=_TEXT_LIST)
LIVE = record(("live",), live=FLAG)
READY = record(("ready",), ready=FLAG)
DOCUMENT = record(("openapi", "info", "paths"), openapi=TEXT, info=_OBJECT, paths=_OBJECT)
LOADED_MODELS = record(("models",), models=_OBJECTS)
HEALTH = record(("ok", "endpoints_without_instance"), ok=FLAG, endpoints_without_instance=_TEXT_LIST)
LIVENESS = record(("ok",), ok=FLAG)
READINESS = record(("ok", "waits_for_dns"), ok=FLAG, waits_for_dns=_TEXT_LIST)
INSTANCES = record(
    ("endpoints", "instances"),
    endpoints=_TEXT_LIST,
    instances={"type": "array", "items": record(("name", "state"), name=TEXT, state=TEXT)},
)
PLACED_MODELS = record(("models", "instances"), models=_OBJECTS, instances=_OBJECTS)
SESSIONS = record(("sessions", "next", "instances"), sessions=_OBJECTS, next=_or_null(TEXT), instances=_OBJECTS)
LOADED_MODEL = record(("modelName", "modelUrl"), modelName=TEXT, modelUrl=TEXT)
MOVED_INSTANCE = record(("name", "state", "outstanding"), name=TEXT, state=TEXT, outstanding=_NATURAL)
_SERIES: Schema = {"type": "object", "additionalProperties": {"type": "array", "items": _or_null(_NUMBER)}}
INSTANCE_HISTORY = record(("name", "series"), name=TEXT, series=_SERIES)
_RESULT = record(("instance", "status"), instance=TEXT, status=_or_null(_NATURAL), error=TEXT)
_RESULTS: Schema = {"type": "array", "items": _RESULT}
MODEL_ACTION = record(("model", "instances"), model=TEXT, instances=_RESULTS)
SESSION_ACTION = record(("session", "action", "instances"), session=TEXT, action=TEXT, instances=_RESULTS)
ASYNC_REQUEST = record(
    ("inference_id", "endpoint", "state", "attempts", "received_at", "updated_at"),
    inference_id=TEXT,
    endpoint=TEXT,
    state=TEXT,
    attempts=_NATURAL,
    instance=_or_null(TEXT),
    reason=_or_null(TEXT),
    received_at=_NUMBER,
    updated_at=_NUMBER,
    due_at=_or_null(_NUMBER),
    expires_at=_or_null(_NUMBER),
    input_location=_or_null(TEXT),
    output_location=_or_null(TEXT),
    failure_location=_or_null(TEXT),
)
ASYNC_REQUESTS = record(
    ("endpoint", "waiting", "running", "decided", "oldest_age_s", "requests"),
    endpoint=TEXT,
    waiting=_NATURAL,
    running=_NATURAL,
    decided=_NATURAL,
    oldest_age_s=_NUMBER,
    requests={"type": "array", "items": ASYNC_REQUEST},
)
CANCELLED_REQUEST = record(("inference_id", "state"), inference_id=TEXT, state=TEXT)
DECISIONS = record(("decisions", "left_out", "oldest"), decisions=_OBJECTS, left_out=_NATURAL, oldest={})
DASHBOARD = record(("version", "time", "uptime_s"), version=TEXT, time=_NUMBER, uptime_s=_NUMBER)


def page(item: Schema) -> Schema:
    """Return the schema of a page of a list."""
    return record(
        ("object", "data", "first_id", "last_id", "has_more"),
        object={"const": "list"},
        data={"type": "array", "items": item},
        first_id=_or_null(TEXT),
        last_id=_or_null(TEXT),
        has_more=FLAG,
    )


_RENDERED = {name: CHAT["properties"][name] for name in ("messages", "chat_template_kwargs")}
TOKENIZE = record(model=TEXT, prompt=TEXT, **_RENDERED, return_token_strs=FLAG)
DETOKENIZE = record(("tokens",), model=TEXT, tokens={"type": "array", "items": {"type": "integer", "minimum": 0}})
EMBEDDINGS = record(
    ("input",),
    input=TEXTS,
    model=TEXT,
    encoding_format={"enum": ["float", "base64"]},
    dimensions=COUNT,
    user=TEXT,
)
RERANK = record(
    ("query", "documents"),
    query=TEXT,
    documents={"type": "array", "items": {"oneOf": [TEXT, record(("text",), text=TEXT)]}, "minItems": 1},
    model=TEXT,
    top_n=COUNT,
    return_documents=FLAG,
    user=TEXT,
)
_USAGE = record(("prompt_tokens", "total_tokens"), prompt_tokens=_NATURAL, total_tokens=_NATURAL)
_EMBEDDING = record(
    ("object", "index", "embedding"),
    object={"const": "embedding"},
    index=_NATURAL,
    embedding={"oneOf": [{"type": "array", "items": _NUMBER}, TEXT]},
)
EMBEDDINGS_ANSWER = record(
    ("object", "data", "model", "usage"),
    object={"const": "list"},
    data={"type": "array", "items": _EMBEDDING},
    model=TEXT,
    usage=_USAGE,
)
_RANKED = record(
    ("index", "relevance_score"), index=_NATURAL, relevance_score=_NUMBER, document=record(("text",), text=TEXT)
)
RERANK_ANSWER = record(
    ("id", "model", "results", "usage"),
    id=TEXT,
    model=TEXT,
    results={"type": "array", "items": _RANKED},
    usage=_USAGE,
)
FILE = record(("file", "purpose"), file=FILE_CONTENT, purpose={"enum": ["vision", "user_data"]})
CONVERSATION = record(items={"type": "array", "items": {"type": "object"}, "maxItems": 20}, metadata=LABELS)
ITEMS = record(("items",), items={"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": 20})
METADATA = record(("metadata",), metadata=LABELS)
TENSORS = record(
    ("inputs",),
    id=TEXT,
    inputs={
        "type": "array",
        "items": record(("name", "shape", "datatype"), name=TEXT, shape={"type": "array"}, datatype=TEXT),
    },
    outputs={"type": "array", "items": record(("name",), name=TEXT)},
)
_SHAPE: Schema = {"type": "array", "items": {"type": "integer"}}
_TENSOR = record(("name", "datatype", "shape"), name=TEXT, datatype=TEXT, shape=_SHAPE)
_TENSOR_LIST: Schema = {"type": "array", "items": _TENSOR}
MODEL_METADATA = record(
    ("name", "versions", "platform", "inputs", "outputs"),
    name=TEXT,
    versions=_TEXT_LIST,
    platform=TEXT,
    inputs=_TENSOR_LIST,
    outputs=_TENSOR_LIST,
)
MODEL_READY = record(("name", "ready"), name=TEXT, ready=FLAG)
TENSORS_ANSWER = record(
    ("model_name", "model_version", "outputs"), model_name=TEXT, model_version=TEXT, outputs=_TENSOR_LIST, id=TEXT
)
LOAD_MODEL = record(("model_name", "url"), model_name=TEXT, url=TEXT)

OPENAI_ERROR = record(("error",), error=record(("message", "type", "param", "code"), message=TEXT, type=TEXT))
RUNTIME_ERROR = record(Message=TEXT, message=TEXT)
_MESSAGE_OR_OBJECT = {"description": "A message, or an object with code and message."}
PLAIN_ERROR = record(("error",), error=_MESSAGE_OR_OBJECT)
CONTAINER_ERROR: Schema = {
    "anyOf": [PLAIN_ERROR, record(("Message",), Message=TEXT)],
    "description": "The second form is that of a path or a method that the port does not serve.",
}
ADMIN_ERROR: Schema = {
    "anyOf": [PLAIN_ERROR, record(("instances",), instances={"type": "array", "items": {"type": "object"}})],
    "description": "The second form has the error of each instance.",
}
