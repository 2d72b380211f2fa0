"""A scripted sagemaker-runtime client of boto3: it records requests and answers in order."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from typing import Any

from botocore.exceptions import ClientError


class Body:
    """The event stream of an answer. A hanging one waits after its parts until it is shut down."""

    def __init__(self, parts: list[bytes], hangs: bool = False) -> None:
        self._parts = parts
        self._hangs = hangs
        self._raw_stream = self
        self._is_shut_down = threading.Event()
        self.is_closed = threading.Event()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            yield {"PayloadPart": {"Bytes": part}}
        if self._hangs:
            assert self._is_shut_down.wait(30), "the stream was not shut down"

    def shutdown(self) -> None:
        self._is_shut_down.set()

    def close(self) -> None:
        self.is_closed.set()


class FakeRuntime:
    """answers: bodies, errors or responses of invoke_endpoint, one for each call."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def _next(self, arguments: dict[str, Any]) -> Any:
        self.asked.append({**arguments, "Body": json.loads(arguments["Body"])})
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def invoke_endpoint_with_response_stream(self, **arguments: Any) -> dict[str, Any]:
        return {"Body": self._next(arguments)}

    def invoke_endpoint(self, **arguments: Any) -> dict[str, Any]:
        return {"Body": io.BytesIO(b"{}"), **self._next(arguments)}


def openai_stream(*texts: str, is_whole: bool = True, **options: Any) -> Body:
    """Return a streamed answer of these tokens, cut every 11 bytes."""
    values: list[Any] = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    if is_whole:
        values.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        values.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(texts)}})
    data = b"".join(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n" for value in values)
    return Body([data[at : at + 11] for at in range(0, len(data), 11)], **options)


def tgi_stream(*texts: str) -> Body:
    """Return a streamed answer in a session."""
    details = {"finish_reason": "eos_token", "generated_tokens": len(texts), "input_length": 5}
    values = [{"token": {"id": 1, "text": text, "logprob": 0.0, "special": False}} for text in texts]
    values[-1] |= {"generated_text": "".join(texts), "details": details}
    return Body([b"data:" + json.dumps(value).encode() + b"\n\n" for value in values])


def refusal(code: str, message: str, original: str = "") -> ClientError:
    """Return the error that boto3 raises."""
    response: Any = {"Error": {"Code": code, "Message": message}, "OriginalMessage": original}
    return ClientError(response, "InvokeEndpointWithResponseStream")
