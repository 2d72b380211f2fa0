"""JSON schemas of the bodies of OpenAI's API, except resources: chat, completions, tokens, embeddings, models."""

from __future__ import annotations

from torchmoor.proxy.api.reference.common_schemas import (
    COUNT,
    FLAG,
    LABELS,
    NATURAL,
    NUMBER,
    OBJECT,
    TEXT,
    TEXT_LIST,
    TEXTS,
    Schema,
    array,
    or_null,
    record,
)
from torchmoor.wire import sampling_parameters

_CONTENT: Schema = {"oneOf": [TEXT, array(OBJECT, minItems=1)]}
FUNCTION = record(("name",), name=TEXT, description=TEXT, parameters=OBJECT, strict=FLAG)
_CUSTOM = record(("name",), name=TEXT, description=TEXT, format=OBJECT)


def _call(arguments: Schema) -> Schema:
    function = record(("name", "arguments"), name=TEXT, arguments=arguments)
    custom = record(("name", "input"), name=TEXT, input=TEXT)
    return {
        "oneOf": [
            record(("id", "type", "function"), id=TEXT, type={"const": "function"}, function=function),
            record(("id", "type", "custom"), id=TEXT, type={"const": "custom"}, custom=custom),
        ]
    }


_MESSAGE = record(
    ("role",),
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content={"oneOf": [*_CONTENT["oneOf"], {"type": "null"}]},
    tool_calls=array(_call({"oneOf": [TEXT, OBJECT]})),
    tool_call_id=TEXT,
    reasoning_content=TEXT,
    reasoning=TEXT,
    refusal=or_null(TEXT),
)
FOR_TEMPLATE: dict[str, Schema] = {
    "tools": array(
        {
            "oneOf": [
                record(("type", "function"), type={"const": "function"}, function=FUNCTION),
                record(("type", "custom"), type={"const": "custom"}, custom=_CUSTOM),
            ]
        }
    ),
    "tool_choice": {"oneOf": [{"enum": ["none", "auto", "required"]}, OBJECT]},
    "parallel_tool_calls": FLAG,
    "chat_template_kwargs": {"type": "object", "maxProperties": 16},
}
_CHOICE: Schema = {**TEXT, "description": "none, auto, required, or the name of a function"}
_EFFORT: Schema = {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]}
REASONING = record(effort=_EFFORT, summary={"enum": ["auto", "concise", "detailed"]})
_WIDER = {  # than in other dialects
    "top_p": sampling_parameters.NumberRange(0, 1),
    "seed": sampling_parameters.NumberRange(-(2**63), 2**63 - 1, is_whole=True),
}
SAMPLING: dict[str, Schema] = {
    **{name: row.schema for name, row in sampling_parameters.SAMPLING_NUMBERS.items() if row.is_openai},
    **{
        name: {**numbers.schema, "description": sampling_parameters.SAMPLING_NUMBERS[name].help}
        for name, numbers in _WIDER.items()
    },
    "ignore_eos": FLAG,
    "stop": TEXTS,
}
_LOGIT_BIAS: Schema = {"type": "object", "additionalProperties": sampling_parameters.LOGIT_BIAS.schema}
TOP_LOGPROBS: Schema = sampling_parameters.TOP_TOKENS.schema
_STREAM_OPTIONS = record(include_usage=FLAG, continuous_usage_stats=FLAG)
AFFINITY: dict[str, Schema] = {"prompt_cache_key": TEXT, "safety_identifier": TEXT, "user": TEXT}

CHAT = record(
    ("model", "messages"),
    model=TEXT,
    messages=array(_MESSAGE, minItems=1),
    max_completion_tokens=COUNT,
    max_tokens=COUNT,
    n=COUNT,
    logit_bias=_LOGIT_BIAS,
    stream=FLAG,
    stream_options=_STREAM_OPTIONS,
    logprobs=FLAG,
    top_logprobs=TOP_LOGPROBS,
    response_format=OBJECT,
    reasoning=REASONING,
    reasoning_effort=_EFFORT,
    metadata=LABELS,
    **{**FOR_TEMPLATE, "tool_choice": {"oneOf": [_CHOICE, OBJECT]}},
    **SAMPLING,
    **AFFINITY,
)
COMPLETION = record(
    ("model", "prompt"),
    model=TEXT,
    prompt=TEXTS,
    max_tokens=COUNT,
    n=COUNT,
    logit_bias=_LOGIT_BIAS,
    stream=FLAG,
    stream_options=_STREAM_OPTIONS,
    logprobs=TOP_LOGPROBS,
    **SAMPLING,
    **AFFINITY,
)


def _completion(kind: str, **choice: Schema) -> Schema:
    """Return the schema of a whole answer with choices, of which each has these fields."""
    ends: Schema = {"enum": ["stop", "length", "tool_calls"]}
    fields = {"index": NATURAL, "finish_reason": ends, "logprobs": or_null(OBJECT), **choice}
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    return record(
        ("id", "object", "created", "model", "choices", "usage"),
        id=TEXT,
        object={"const": kind},
        created=NATURAL,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=array(record(tuple(fields), **fields), minItems=1),
        usage=record(counts, **dict.fromkeys(counts, NATURAL)),
    )


CHAT_ANSWER = _completion(
    "chat.completion",
    message=record(
        ("role", "content"),
        role={"const": "assistant"},
        content=or_null(TEXT),
        tool_calls=array(_call(TEXT)),
        reasoning_content=TEXT,
    ),
)
COMPLETION_ANSWER = _completion("text_completion", text=TEXT)

_RENDERED = {name: CHAT["properties"][name] for name in ("messages", "chat_template_kwargs")}
TOKENIZE = record(model=TEXT, prompt=TEXT, **_RENDERED, return_token_strs=FLAG)
TOKENS = record(
    ("count", "max_model_len", "tokens", "token_strs"),
    count=NATURAL,
    max_model_len=NATURAL,
    tokens=array(NATURAL),
    token_strs=or_null(TEXT_LIST),
)
DETOKENIZE = record(("tokens",), model=TEXT, tokens=array(NATURAL))
PROMPT = record(("prompt",), prompt=TEXT)

EMBEDDINGS = record(
    ("input",),
    input=TEXTS,
    model=TEXT,
    encoding_format={"enum": ["float", "base64"]},
    dimensions=COUNT,
    user=TEXT,
)
_USAGE = record(("prompt_tokens", "total_tokens"), prompt_tokens=NATURAL, total_tokens=NATURAL)
_EMBEDDING = record(
    ("object", "index", "embedding"),
    object={"const": "embedding"},
    index=NATURAL,
    embedding={"oneOf": [array(NUMBER), TEXT]},
)
EMBEDDINGS_ANSWER = record(
    ("object", "data", "model", "usage"),
    object={"const": "list"},
    data=array(_EMBEDDING),
    model=TEXT,
    usage=_USAGE,
)
RERANK = record(
    ("query", "documents"),
    query=TEXT,
    documents=array({"oneOf": [TEXT, record(("text",), text=TEXT)]}, minItems=1),
    model=TEXT,
    top_n=COUNT,
    return_documents=FLAG,
    user=TEXT,
)
_RANKED = record(
    ("index", "relevance_score"), index=NATURAL, relevance_score=NUMBER, document=record(("text",), text=TEXT)
)
RERANK_ANSWER = record(
    ("id", "model", "results", "usage"),
    id=TEXT,
    model=TEXT,
    results=array(_RANKED),
    usage=_USAGE,
)

MODEL = record(
    ("id", "object", "created", "owned_by", "capabilities"),
    id=TEXT,
    object={"const": "model"},
    created=NATURAL,
    owned_by=TEXT,
    capabilities=TEXT_LIST,
)
MODELS = record(("object", "data"), object={"const": "list"}, data=array(MODEL))

ERROR = record(("error",), error=record(("message", "type", "param", "code"), message=TEXT, type=TEXT))
