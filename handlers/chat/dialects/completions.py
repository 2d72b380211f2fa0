"""The dialect of OpenAI's completions: bodies whose `prompt` is continued unchanged, and their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlers.chat.checks import check_unicode, read_flag
from handlers.chat.commands import Generate
from handlers.chat.dialects.completion_fields import (
    OpenAIAnswer,
    name_finish_reason,
    read_answer,
    read_num_choices,
    refuse_unsupported,
)
from handlers.chat.forms import Summary, Token, encode
from handlers.chat.parameters import Neutral, Parameters, check_parameter, read_openai_parameters
from handlers.errors import InvalidRequest
from handlers.requests.incoming import Incoming
from handlers.settings.request import RequestSettings

DEFAULT_TOKENS = 16  # OpenAI's
KIND = "text_completion"
_FIELDS = {"prompt", "model", "n", "stream", "stream_options", "logprobs"}

_NEUTRAL: Neutral = {
    "top_logprobs": (lambda v: False, "absent: completions have it as 'logprobs'"),
    "echo": (lambda v: v is False, "false"),
    "suffix": (lambda v: v == "", "absent"),
}


def parse_completion(incoming: Incoming, body: dict[str, Any], settings: RequestSettings) -> Generate:
    """Read a body with `prompt`. Raises InvalidRequest, which names the field."""
    given = {name: value for name, value in body.items() if value is not None}
    refuse_unsupported(given, _FIELDS, _NEUTRAL, "completions")
    is_streaming = read_flag(given, "stream")
    prompt, *more_prompts = _read_prompts(given, settings)
    parameters = {"max_new_tokens": DEFAULT_TOKENS, "length_field": "max_tokens", **read_openai_parameters(given)}
    if "logprobs" in given:
        parameters["top_n_tokens"] = check_parameter("top_n_tokens", given["logprobs"], "'logprobs'")
    return Generate(
        caller=incoming.caller,
        prompt=prompt,
        more_prompts=tuple(more_prompts),
        messages=(),
        parameters=Parameters(**parameters),
        invocation_id=incoming.invocation_id,
        form=CompletionForm(
            **read_answer("cmpl", given, incoming),
            has_logprobs="logprobs" in given,
            num_prompts=1 + len(more_prompts),
        ),
        is_streaming=is_streaming,
        num_choices=read_num_choices(given, settings, 1 + len(more_prompts)),
    )


def _read_prompts(given: Mapping[str, Any], settings: RequestSettings) -> list[str]:
    """Return the texts to continue, of which a client may send several."""
    prompt = given.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    are_texts = all(isinstance(each, str) and each for each in prompts)
    if not are_texts or not 1 <= len(prompts) <= settings.max_answers:
        raise InvalidRequest(
            f"'prompt' must be a text, or a list of 1 to {settings.max_answers} texts, and no text may be empty; token "
            "ids are not read",
            param="prompt",
        )
    for each in prompts:
        check_unicode(each, "'prompt'", "prompt")
    return prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionForm(OpenAIAnswer):
    """Encodes `text_completion` objects: events that end with `data: [DONE]`, or one whole answer."""

    chunk_kind = KIND

    def begin(self) -> bytes:
        return b""

    def part(self, token: Token, summary: Summary | None) -> bytes:
        has_chunk = self.has_logprobs or bool(token.text)
        choice = self._choice(self.index, token.text, None, [token])
        data = self.write_chunk(choice, token, summary) if has_chunk else b""
        if summary is None:
            return data
        return data + self.write_chunk(self._choice(self.index, "", name_finish_reason(summary)), token, summary)

    def whole_of(self, summaries: Sequence[Summary]) -> bytes:
        choices = [
            self._choice(index, each.text, name_finish_reason(each), each.tokens)
            for index, each in enumerate(summaries)
        ]
        return encode({**self.head(KIND), "choices": choices, "usage": self.count_tokens(summaries)})

    def _choice(self, index: int, text: str, finish_reason: str | None, tokens: Sequence[Token] = ()) -> dict[str, Any]:
        logprobs = _logprobs(tokens) if self.has_logprobs and tokens else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return OpenAI's `logprobs` object: the tokens' texts, log probabilities, likeliest alternatives and offsets."""
    return {
        "tokens": [token.own_text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_by_text(token.top) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _by_text(top: Sequence[Token]) -> dict[str, float]:
    """Return the log probabilities of the likeliest tokens by their texts; of equal texts, the likeliest token's.

    Tokens that are a part of a character have the same text.
    """
    found: dict[str, float] = {}
    for each in top:
        found.setdefault(each.own_text, each.logprob)
    return found
