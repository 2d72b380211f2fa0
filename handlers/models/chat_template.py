"""Renders a conversation as a prompt: default templates, limits of templates, and texts that imitate turns."""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from handlers.errors import InvalidRequest, SettingsError
from handlers.models.answer_style import TOOL_MARKS, find_answer_style
from handlers.worker.limited_process import LimitedProcess, WorkTooCostly

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
LLAMA2_MARKS = (
    "[INST]",
    "[/INST]",
    "<<SYS>>",
    "<</SYS>>",
)  # ordinary text to the tokenizer, so a message could contain them

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
# Tokens of this form mark turns even if the tokenizer does not call them special. The second bar is full-width.
_BRACKETED = re.compile("<[|\uff5c].+[|\uff5c]>")
MAX_ROUNDS = 4  # of looking for marks in what the tokenizer makes of a text
RENDER_CPU_S = 3.0
RENDER_MEMORY_BYTES = 256 << 20


class TemplateFailed(Exception):
    """A template did not render; the message has the reason.

    is_refusal: the template itself refused the messages.
    """

    def __init__(self, reason: str, *, is_refusal: bool = False) -> None:
        super().__init__(reason)
        self.is_refusal = is_refusal


class TemplateProcess(LimitedProcess):
    """Renders templates, one at a time, in a process of their own. Any thread.

    Checkpoints bring templates, so their time and memory are limited.
    """

    def __init__(self, cpu_s: float = RENDER_CPU_S) -> None:
        super().__init__("template", cpu_s, RENDER_MEMORY_BYTES)

    def check(self, template: str) -> None:
        """Raise TemplateFailed if a template cannot be compiled, as for an error of its syntax."""
        self.render({"compiled": template})

    def render(self, request: dict[str, Any]) -> str:
        """Return the rendered text. request: as limited_child.py describes it. Raises TemplateFailed."""
        try:
            answer = self.ask(request)
        except WorkTooCostly as exc:
            raise TemplateFailed(str(exc)) from exc
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise TemplateFailed(answer["refused"], is_refusal=True)
        raise TemplateFailed(f"it raised {answer['failed']}")


SHARED_PROCESS = TemplateProcess()  # one per worker; one per model would cost 40 MB each


class ChatTemplate:
    """A checkpoint's template, or the one that its family was trained with.

    A checkpoint may have another template for requests with tools. style: the marks in the model's answers.

    renderer: the tokenizer, or the processor of a vision model. model_type: as in the checkpoint's config. Raises
    SettingsError for a template that cannot be compiled.
    """

    def __init__(self, renderer: Any, tokenizer: Any, model_type: str, image_token: str | None = None) -> None:
        self._template = renderer.chat_template
        self._tokenizer = tokenizer
        self._variables: dict[str, str | None] = {}
        marks: Sequence[str] = ()
        self._tool_template = self._template
        if isinstance(self._template, dict):
            self._tool_template = self._template.get("tool_use") or self._template.get("default")
            self._template = self._template.get("default")
        if not self._template and model_type == "llama":
            self._template, marks = LLAMA2, LLAMA2_MARKS
        elif not self._template and model_type == "llava":
            self._template = LLAVA15
            self._variables["image_token"] = image_token
        for each in {self._template, self._tool_template} - {None, ""}:
            _check(each)
        self.style = find_answer_style(self._tool_template or "", tokenizer)
        own = [*marks, *([image_token] if image_token else [])]
        self._said_controls = _Controls(tokenizer, own)
        self._controls = _Controls(tokenizer, [*own, *(TOOL_MARKS if self.style.call else ())])

    def check(self) -> None:
        """Raise InvalidRequest without a template."""
        if not self._template:
            raise InvalidRequest(NO_TEMPLATE)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the conversation as text, up to the beginning of the assistant's next answer.

        messages: with a text or a list of parts as content, as this template reads it. tools: the answer may call them.
        variables: for the template. Variables that this method sets itself win over them.
        Raises InvalidRequest without a template, if it refuses the messages, or if it exceeds its limits.
        """
        self.check()
        template = self._tool_template if tools else self._template
        request: dict[str, Any] = {"chat_template": template, "add_generation_prompt": True}
        try:
            request["conversations"] = [[self._disarm_message(message) for message in messages]]
            if tools:
                request["tools"] = self._disarm_all(list(tools))
            own = {**self._tokenizer.special_tokens_map, **self._variables, **request}
            return SHARED_PROCESS.render({**self._disarm_all(variables), **own})
        except RecursionError:
            raise InvalidRequest("the tools, or the arguments of a call, are nested too deeply") from None
        except TemplateFailed as exc:
            problem = "refuses these messages" if exc.is_refusal else "cannot render these messages"
            raise InvalidRequest(f"the model's chat template {problem}: {exc}") from exc

    def disarm(self, text: str) -> str:
        """Put a space into each string that the tokenizer or the template would read as a control mark.

        So the text of a user or a model cannot imitate a turn.
        """
        return self._controls.disarm(text)

    def _disarm_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Disarm a message's texts. The assistant's text may contain the marks of calls."""
        controls = self._said_controls if message["role"] == "assistant" else self._controls
        content = message["content"]
        if isinstance(content, str):
            content = controls.disarm(content)
        else:
            content = [{**p, "text": controls.disarm(p["text"])} if p["type"] == "text" else p for p in content]
        others = {name: value for name, value in message.items() if name not in ("role", "content")}
        return {"role": message["role"], "content": content, **self._disarm_all(others)}

    def _disarm_all(self, value: Any) -> Any:
        """Disarm each text of a JSON value."""
        if isinstance(value, str):
            return self.disarm(value)
        if isinstance(value, Mapping):
            return {self.disarm(name): self._disarm_all(inner) for name, inner in value.items()}
        return [self._disarm_all(inner) for inner in value] if isinstance(value, list) else value


def _check(template: Any) -> None:
    """Raise SettingsError unless a checkpoint's template can be compiled."""
    try:
        SHARED_PROCESS.check(template)
    except TemplateFailed as exc:
        raise SettingsError(
            f"the checkpoint's chat template cannot be used: {exc}; correct its chat_template.jinja, or the "
            "chat_template in its tokenizer_config.json"
        ) from exc


class _Controls:
    """The strings that stand for control tokens in texts. marks: those that the tokenizer does not name."""

    def __init__(self, tokenizer: Any, marks: Sequence[str]) -> None:
        tokens = tokenizer.added_tokens_decoder.values()
        added = [token.content for token in tokens if token.special or _BRACKETED.fullmatch(token.content)]
        self._normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        named = {*added, *tokenizer.all_special_tokens, *marks}
        # Behind a digit, because some normalizers change the beginning of a text.
        normal = {self._normalize(f"0{text}").partition("0")[2] for text in named}
        found = {text for text in named | normal if len(text.strip()) > 1}
        self._pattern = re.compile(_any_of(found)) if found else None

    def disarm(self, text: str) -> str:
        """Put a space into each control string.

        A text that the tokenizer's normalizer would turn into one, such as full-width letters, is normalized, too.
        Raises InvalidRequest if a space does not help, because the normalizer removes it.
        """
        if self._pattern is None:
            return text
        disarmed = self._pattern.sub(_space, text)
        for _ in range(MAX_ROUNDS):
            normal = self._normalize(disarmed)
            if self._pattern.search(normal) is None:
                return disarmed
            disarmed = self._pattern.sub(_space, normal)
        raise InvalidRequest("a text has marks of turns that this model's tokenizer cannot tell from its own")

    def _normalize(self, text: str) -> str:
        """Return what the tokenizer makes of a text before it looks for tokens."""
        if self._normalizer is None:
            return text
        return str(self._normalizer.normalize_str(text.encode(errors="replace").decode()))


def _space(found: "re.Match[str]") -> str:
    return f"{found[0][0]} {found[0][1:]}"


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern that matches the longest of these texts, none of them empty.

    Alternatives share their prefixes: some tokenizers have thousands with the same prefix, and trying each at every `<`
    of a long question would block the worker for seconds.
    """
    rests: dict[str, set[str]] = {}
    for text in texts:
        rests.setdefault(text[0], set()).add(text[1:])
    found = []
    for first, following in rests.items():
        pattern = _any_of(following - {""})
        found.append(re.escape(first) + (f"(?:{pattern}){'?' * ('' in following)}" if pattern else ""))
    return "|".join(found)
