"""Answers in the form of OpenAI's chat completions."""

from dataclasses import dataclass
from typing import Any

from handlers.chat.forms import JSON, Summary, Token, encode
from handlers.errors import HandlerError

# Every other reason of the engine (the model's own end, a stop string) is "stop" here.
_FINISH_REASONS = {"length": "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIForm:
    """`chat.completion.chunk` events that end with `data: [DONE]`, or one `chat.completion`.

    created: seconds since 1970. has_usage: a stream ends with a chunk that counts tokens.
    """

    id: str
    created: int
    model: str
    has_usage: bool = False
    has_logprobs: bool = False

    content_type = "text/event-stream"
    whole_content_type = JSON

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def token(self, token: Token, summary: Summary | None) -> bytes:
        data = b""
        if token.text or self.has_logprobs:
            data = self._chunk({"content": token.text}, logprobs=self._logprobs([token]))
        if summary is not None:
            data += self._chunk({}, finish_reason=_finish_reason(summary))
            if self.has_usage:
                data += _event({**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(summary)})
            data += b"data: [DONE]\n\n"
        return data

    def error(self, error: HandlerError) -> bytes:
        """Without [DONE], so that half an answer never looks whole."""
        return b"data: " + error.body() + b"\n\n"

    def whole(self, summary: Summary) -> bytes:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": summary.text, "refusal": None},
            "logprobs": self._logprobs(summary.tokens),
            "finish_reason": _finish_reason(summary),
        }
        return encode({**self._head("chat.completion"), "choices": [choice], "usage": _usage(summary)})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, delta: dict[str, str], *, finish_reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        value = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self.has_usage:
            value["usage"] = None
        return _event(value)

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        content = [
            {"token": t.text, "logprob": t.logprob, "bytes": list(t.text.encode()), "top_logprobs": []} for t in tokens
        ]
        return {"content": content, "refusal": None}


def _event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _finish_reason(summary: Summary) -> str:
    return _FINISH_REASONS.get(summary.finish_reason, "stop")


def _usage(summary: Summary) -> dict[str, int]:
    prompt, answer = summary.num_prompt_tokens, summary.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
