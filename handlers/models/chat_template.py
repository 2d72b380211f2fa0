"""How a conversation becomes a prompt: templates for checkpoints that bring none, texts that must not fake turns."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from handlers.errors import InvalidRequest

# Source: Touvron et al. 2023, "Llama 2", and the prompts of Meta's reference code.
LLAMA2 = """\
{%- set ns = namespace(system=none, num_turns=0) -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if ns.num_turns -%}{{ raise_exception('a system message must be the first') }}{%- endif -%}
{%- set ns.system = message.content -%}
{%- else -%}
{%- if (message.role == 'user') != (ns.num_turns % 2 == 0) -%}
{{ raise_exception('messages of user and assistant must alternate, and begin with the user') }}
{%- endif -%}
{%- set ns.num_turns = ns.num_turns + 1 -%}
{%- if message.role == 'user' -%}
{{- bos_token ~ '[INST] ' -}}
{%- if ns.system is not none -%}
{{- '<<SYS>>\\n' ~ ns.system ~ '\\n<</SYS>>\\n\\n' -}}
{%- set ns.system = none -%}
{%- endif -%}
{{- message.content | trim ~ ' [/INST]' -}}
{%- else -%}
{{- ' ' ~ message.content | trim ~ ' ' ~ eos_token -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
"""
LLAMA2_MARKS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")  # no tokens of their own, so a text could spell them

# Source: Liu et al. 2023, "Improved Baselines with Visual Instruction Tuning", in the spelling of its model cards.
LLAVA15 = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{{- ' ' -}}
{%- else -%}
{{- message.role | upper ~ ': ' -}}
{%- for part in message.content if part.type == 'image' -%}{{- image_token ~ '\\n' -}}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
{{- eos_token if message.role == 'assistant' else ' ' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""

NO_TEMPLATE = (
    "this checkpoint has no chat template, so it cannot read a conversation; send the whole prompt as 'inputs', or "
    "add a chat_template.jinja to the checkpoint"
)
# Such tokens mark turns even where a tokenizer does not call them special. The second bar is the full-width one.
_BRACKETED = re.compile("<[|\uff5c].+[|\uff5c]>")


class ChatTemplate:
    """A checkpoint's own template, or the one its family was trained with.

    renderer: the tokenizer, or the processor of a model that sees. model_type: as in the checkpoint's config.
    """

    def __init__(self, renderer: Any, tokenizer: Any, model_type: str, image_token: str | None = None) -> None:
        self._renderer = renderer
        self._options: dict[str, Any] = {}
        marks: Sequence[str] = ()
        if not renderer.chat_template and model_type == "llama":
            self._options, marks = {"chat_template": LLAMA2}, LLAMA2_MARKS
        elif not renderer.chat_template and model_type == "llava":
            self._options = {"chat_template": LLAVA15, "image_token": image_token}
        self._has_template = bool(renderer.chat_template or self._options)
        self._controls = _controls(tokenizer, [*marks, *([image_token] if image_token else [])])

    def check(self) -> None:
        """Raises InvalidRequest if there is no template."""
        if not self._has_template:
            raise InvalidRequest(NO_TEMPLATE)

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The conversation as text, up to where the assistant's next answer begins.

        messages: their content a text or a list of parts, as this checkpoint's template reads it.
        Raises InvalidRequest if there is no template, or if it refuses the messages.
        """
        self.check()
        safe = [{**message, "content": self._disarm_content(message["content"])} for message in messages]
        try:
            text: str = self._renderer.apply_chat_template(
                safe, add_generation_prompt=True, tokenize=False, **self._options
            )
        except TemplateError as exc:
            reason = str(exc)[:200]
            raise InvalidRequest(f"the model's chat template refuses these messages: {reason}") from exc
        return text

    def disarm(self, text: str) -> str:
        """The text with a space in each string that the tokenizer or the template would take for a mark of theirs.

        So what a user or a model has written is text and nothing else; the rest of it reads as before.
        """
        return text if self._controls is None else self._controls.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text)

    def _disarm_content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self.disarm(content)
        return [{**p, "text": self.disarm(p["text"])} if p["type"] == "text" else p for p in content]


def _controls(tokenizer: Any, marks: Sequence[str]) -> "re.Pattern[str] | None":
    """What finds any string that stands for a control token."""
    added = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special or _BRACKETED.fullmatch(t.content)]
    found = {text for text in [*added, *tokenizer.all_special_tokens, *marks] if len(text.strip()) > 1}
    if not found:
        return None
    return re.compile(_any_of(found))


def _any_of(texts: Iterable[str]) -> str:
    """A pattern that matches the longest of these texts, none of them empty.

    Alternatives share their beginnings: some tokenizers have thousands that begin alike, and trying each at every `<`
    of a long question would hold up the whole worker for seconds.
    """
    rests: dict[str, set[str]] = {}
    for text in texts:
        rests.setdefault(text[0], set()).add(text[1:])
    found = []
    for first, following in rests.items():
        pattern = _any_of(following - {""})
        found.append(re.escape(first) + (f"(?:{pattern}){'?' * ('' in following)}" if pattern else ""))
    return "|".join(found)
