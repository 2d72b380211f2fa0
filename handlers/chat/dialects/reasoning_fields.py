"""The fields in which chat completions and the Responses API request reasoning, and their checks."""

from collections.abc import Mapping
from typing import Any

from handlers.chat.template_variables import read_template_variables

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SUMMARIES = ("auto", "concise", "detailed")
_VALUES: dict[str, tuple[str, ...]] = {
    "effort": EFFORTS,
    "summary": SUMMARIES,
    "generate_summary": SUMMARIES,  # its earlier name
    "context": ("auto",),  # the template decides which earlier reasoning the model reads
    "mode": ("standard",),
}
REASONING_WANTED = "an object with an effort and a summary"


def is_reasoning(given: Any) -> bool:
    """Return whether a value is OpenAI's `reasoning`, with members and values that are supported here."""
    return isinstance(given, dict) and all(
        value is None or value in _VALUES.get(name, ()) for name, value in given.items()
    )


def read_reasoning(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of Parameters by which a request controls reasoning.

    The effort is a variable of the chat template; those of `chat_template_kwargs` take precedence. given: a request
    whose fields `is_reasoning` has checked. Raises InvalidRequest.
    """
    variables: dict[str, Any] = {}
    effort = given.get("reasoning_effort") or given.get("reasoning", {}).get("effort")
    if effort is not None:
        variables["reasoning_effort"] = effort
    if effort == "none":
        variables["enable_thinking"] = False
    return {
        "reasoning_field": _find_reasoning(given),
        "template_variables": {**variables, **read_template_variables(given)},
    }


def _find_reasoning(given: Mapping[str, Any]) -> str:
    """Return the name of the field that requests reasoning, or "". A summary alone, which Codex sends, does not."""
    if given.get("reasoning", {}).get("effort") not in (None, "none"):
        return "reasoning"
    return "" if given.get("reasoning_effort") in (None, "none") else "reasoning_effort"
