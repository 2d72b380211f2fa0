"""Variables that a request sets for the chat template: the field `chat_template_kwargs`, and its limits."""

import json
import re
from collections.abc import Mapping
from typing import Any

from handlers.chat.checks import check_texts, names
from handlers.errors import InvalidRequest

TEMPLATE_FIELD = "chat_template_kwargs"  # as vLLM and SGLang call it
MAX_VARIABLES, MAX_NAME_CHARS, MAX_VALUE_CHARS = 16, 64, 512  # as of OpenAI's metadata
MAX_DEPTH = 4  # of lists and objects
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Set by the renderer; transformers and Jinja have parameters of these names. A tokenizer's special tokens have those at
# the end. If a model has others, they win over a client's variable when the template is rendered.
_SET_HERE = {
    *("messages", "conversation", "conversations", "tools", "documents", "chat_template", "tokenize", "self"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    *("raise_exception", "strftime_now"),
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens", "image_token", "video_token", "audio_token"),
}


def read_template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body's template variables; empty without any. given: without null fields. Raises InvalidRequest."""
    variables = given.get(TEMPLATE_FIELD, {})
    if not isinstance(variables, dict) or len(variables) > MAX_VARIABLES:
        message = f"'{TEMPLATE_FIELD}' must be an object of at most {MAX_VARIABLES} variables"
        raise InvalidRequest(message, param=TEMPLATE_FIELD)
    wrong = {name for name in variables if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name)}
    if wrong:
        wanted = f"at most {MAX_NAME_CHARS} letters, digits and underscores, with no digit first"
        message = f"'{TEMPLATE_FIELD}' has the names {names(wrong)}: a name has {wanted}"
        raise InvalidRequest(message, param=TEMPLATE_FIELD)
    taken = _SET_HERE & set(variables)
    if taken:
        message = f"'{TEMPLATE_FIELD}' cannot set {names(taken)}, which the server sets for the template"
        raise InvalidRequest(message, param=TEMPLATE_FIELD)
    for name, value in variables.items():
        _check_value(value, f"{TEMPLATE_FIELD}.{name}")
    return variables


def _check_value(value: Any, where: str) -> None:
    """Raise InvalidRequest for a value that is too large, or not JSON."""
    check_texts(value, where, TEMPLATE_FIELD)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidRequest(f"{where} must have finite numbers", param=TEMPLATE_FIELD) from None
    if len(text) > MAX_VALUE_CHARS or _depth(value) > MAX_DEPTH:
        raise InvalidRequest(
            f"{where} must be JSON of at most {MAX_VALUE_CHARS} characters, nested at most {MAX_DEPTH} deep",
            param=TEMPLATE_FIELD,
        )


def _depth(value: Any) -> int:
    """Return how many lists and objects are nested in a JSON value; 0 for a scalar."""
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)
