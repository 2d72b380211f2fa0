"""How a checkpoint marks calls of tools and reasoning in its answers, as its chat template shows."""

import re
from dataclasses import dataclass, replace
from typing import Any

CALL = ("<tool_call>", "</tool_call>")  # Hermes and Qwen: {"name": ..., "arguments": {...}} in between
THOUGHT = ("<think>", "</think>")
CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
TOOL_MARKS = (*CALL, "<tool_response>", "</tool_response>")
_TOOLS = re.compile(r"\btools\b")
_EFFORT = re.compile(r"\breasoning_effort\b")
_OTHER_CALLS = "<function="  # calls as XML inside the same marks


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """The marks around calls and around reasoning; None if the template has none that this server reads.

    begins_in_thought: the prompt ends with the first mark of reasoning. knows_tools: the template shows tools to the
    model, in whatever form it answers. knows_effort: the template reads `reasoning_effort`.
    """

    call: tuple[str, str] | None = None
    thought: tuple[str, str] | None = None
    begins_in_thought: bool = False
    knows_tools: bool = False
    knows_effort: bool = False

    def after(self, prompt_end: str) -> "AnswerStyle":
        """Return the style of an answer to a prompt with this end, which may open or close the reasoning."""
        if self.thought is None:
            return self
        begin, end = self.thought
        left = prompt_end.rstrip()
        return replace(
            self, thought=None if left.endswith(end) else self.thought, begins_in_thought=left.endswith(begin)
        )


def forced_call(name: str) -> tuple[str, str]:
    """Return the text before and after a forced call's arguments, between the marks, for a grammar.

    CALL_HEAD reads the first part, and other forms of it that checkpoints write by themselves.
    """
    return f'{{"name": "{name}", "arguments": ', "}"


def find_answer_style(template: str, tokenizer: Any) -> AnswerStyle:
    """Find the marks. Those that the tokenizer leaves out of texts as special tokens do not count."""
    unseen = set(tokenizer.all_special_tokens)
    knows_tools = _TOOLS.search(template) is not None
    has_calls = knows_tools and CALL[0] in template and _OTHER_CALLS not in template and not unseen & set(CALL)
    has_thoughts = THOUGHT[1] in template and not unseen & set(THOUGHT)
    return AnswerStyle(
        call=CALL if has_calls else None,
        thought=THOUGHT if has_thoughts else None,
        knows_tools=knows_tools,
        knows_effort=_EFFORT.search(template) is not None,
    )
