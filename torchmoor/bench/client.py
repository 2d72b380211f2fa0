"""One client of an endpoint: conversations with or without a session, streamed or not; times of each request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp
from botocore.eventstream import EventStreamBuffer, ParserError
from botocore.exceptions import BotoCoreError

from torchmoor.clients.errors import StreamError
from torchmoor.clients.runtime import explain
from torchmoor.clients.signing import Signer
from torchmoor.clients.streams import StreamReader
from torchmoor.wire import headers as wire
from torchmoor.wire.receipt import read_receipt

SESSION = wire.SESSION_ID
ERROR_TYPE = "x-amzn-ErrorType"
MAX_REASON = 300  # characters


@dataclass(slots=True)
class Sample:
    """A question and its answer, or its error. Times are seconds of a monotonic clock.

    began: when the question was sent. token_times: arrival of each part of a streamed answer; empty for a whole answer.
    error: the kind of failure, one of a few; None for a complete answer. reason: the endpoint's error text, if any.
    was_asked: False if the failure prevented the question from being sent.
    """

    began: float
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)
    output_tokens: int = 0
    receipt: dict[str, str | int | float] = field(default_factory=dict)
    error: str | None = None
    reason: str = ""
    text: str = ""
    was_asked: bool = True

    @property
    def latency_s(self) -> float:
        return self.ended - self.began

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None for a whole answer."""
        return self.token_times[0] - self.began if self.token_times else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None with fewer than two tokens."""
        if not self.token_times or self.output_tokens < 2:
            return None
        return (self.ended - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Seconds between consecutive parts of the answer."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]


class Refused(Exception):
    """An error answer: its type, and its message for users."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


# BotoCoreError: credentials that cannot be renewed.
FAILURES = (Refused, StreamError, ParserError, BotoCoreError, aiohttp.ClientError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationPlan:
    """The form of each conversation."""

    url: str
    endpoint: str
    questions: Sequence[str]  # used in turn
    images: Sequence[str] = ()  # addresses or data URLs; each conversation has one of them
    num_turns: int
    is_stateless: bool  # send the whole conversation with each question, without a session
    is_streamed: bool
    parameters: Mapping[str, Any] = field(default_factory=dict)


class LoadClient:
    """Runs conversations, one after another or concurrently."""

    def __init__(self, http: aiohttp.ClientSession, signer: Signer, plan: ConversationPlan) -> None:
        self._http = http
        self._signer = signer
        self._plan = plan
        self._base = f"{plan.url.rstrip('/')}/endpoints/{plan.endpoint}"

    async def converse(self, number: int, may_go_on: Callable[[], bool], take: Callable[[Sample], None]) -> None:
        """Run conversation `number`; it ends early after an error, or when the caller stops it.

        take: is given each question's sample. An opening that fails is a sample, too.
        """
        images = [self._plan.images[number % len(self._plan.images)]] if self._plan.images else []
        session = "" if self._plan.is_stateless else await self._open(images, take)
        if session is None:
            return
        messages: list[dict[str, Any]] = []
        try:
            for turn in range(self._plan.num_turns):
                if not may_go_on():
                    return
                question = self._plan.questions[(number + turn) % len(self._plan.questions)]
                if turn == 0:
                    question = f"[{number}] {question}"  # otherwise all conversations would share one KV cache
                sample = await self._ask(session, question, messages, images)
                take(sample)
                if sample.error is not None:
                    return
        finally:
            if session:
                await asyncio.shield(self._close(session))

    async def _open(self, images: Sequence[str], take: Callable[[Sample], None]) -> str | None:
        body: dict[str, Any] = {"requestType": "NEW_SESSION"}
        if images:
            body = {"type": "start_session", "image": images[0]}
        began = monotonic()
        try:
            async with self._post("invocations", body, {SESSION: "NEW_SESSION"}) as answer:
                await _check(answer)
                await answer.read()
                opened: str = answer.headers[wire.NEW_SESSION_ID]
                return opened.partition(";")[0]
        except (*FAILURES, KeyError) as error:
            kind = f"opening: {_kind(error)}"
            take(Sample(began, monotonic(), error=kind, reason=_reason(error), was_asked=False))
            return None

    async def _close(self, session: str) -> None:
        try:
            async with self._post("invocations", {"type": "close_session"}, {SESSION: session}) as answer:
                await answer.read()
        except FAILURES:
            pass  # it expires

    async def _ask(self, session: str, question: str, messages: list[dict[str, Any]], images: Sequence[str]) -> Sample:
        """Ask one question. Without a session, send all `messages` and append the answer to them."""
        if session:
            body: dict[str, Any] = {
                "type": "send_text_prompt",
                "prompt_text": question,
                "stream": self._plan.is_streamed,
                "parameters": {**self._plan.parameters, "details": True},
            }
            headers = {SESSION: session}
        else:
            messages.append({"role": "user", "content": _content(question, [] if messages else images)})
            parameters = dict(self._plan.parameters)
            if "max_new_tokens" in parameters:
                parameters["max_tokens"] = parameters.pop("max_new_tokens")
            body = {"messages": messages, "stream": self._plan.is_streamed, **parameters}
            if self._plan.is_streamed:
                body["stream_options"] = {"include_usage": True}
            headers = {}
        sample = Sample(monotonic())
        try:
            if self._plan.is_streamed:
                await self._stream(body, headers, sample)
            else:
                await self._whole(body, headers, sample)
        except FAILURES as error:
            sample.error, sample.reason = _kind(error), _reason(error)
        sample.ended = monotonic()
        if not session:
            messages.append({"role": "assistant", "content": sample.text})
        sample.text = ""  # saves memory in a long load
        return sample

    async def _stream(self, body: Mapping[str, Any], headers: Mapping[str, str], sample: Sample) -> None:
        asked = {**headers, wire.ACCEPT: "text/event-stream"}
        async with self._post("invocations-response-stream", body, asked) as answer:
            await _check(answer)
            sample.receipt = read_receipt(answer.headers)
            reader = StreamReader()
            async for part in _parts(answer):
                now = monotonic()
                for piece in reader.feed(part):
                    if piece.text or piece.token_id is not None:
                        sample.token_times.append(now)
            for _ in reader.close():
                pass
            sample.text = reader.text
            sample.output_tokens = reader.usage.answer_tokens if reader.usage else len(sample.token_times)

    async def _whole(self, body: Mapping[str, Any], headers: Mapping[str, str], sample: Sample) -> None:
        async with self._post("invocations", body, headers) as answer:
            await _check(answer)
            content = await answer.read()
            sample.receipt = read_receipt(answer.headers)
            sample.output_tokens = int(sample.receipt.get("generated_tokens", 0))
        reader = StreamReader()
        for _ in reader.feed(content + b"\n"):
            pass
        sample.text = reader.text

    def _post(self, operation: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        url, data = f"{self._base}/{operation}", json.dumps(body).encode()
        given = {"Content-Type": "application/json", **headers}
        return self._http.post(url, data=data, headers=self._signer.sign("POST", url, given, data))


def _content(question: str, images: Sequence[str]) -> Any:
    if not images:
        return question
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [*parts, {"type": "text", "text": question}]


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise Refused(f"{answer.status} {answer.headers.get(ERROR_TYPE, '')}".strip(), await reason_of(answer))


async def reason_of(answer: aiohttp.ClientResponse) -> str:
    """Return the message of an error answer: the model's, if the model refused."""
    content = (await answer.read()).decode(errors="replace")
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return content
    return explain({**found, "Error": found, "ResponseMetadata": {"HTTPStatusCode": answer.status}})


async def _parts(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the bytes of each PayloadPart. Raises Refused for an exception in the stream, ParserError."""
    buffer = EventStreamBuffer()
    async for data in answer.content.iter_any():
        buffer.add_data(data)
        for event in buffer:
            if event.headers.get(":message-type") == "exception":
                kind = str(event.headers.get(":exception-type", "an exception in the stream"))
                raise Refused(kind, event.payload.decode(errors="replace"))
            yield event.payload


def _reason(error: Exception) -> str:
    """Return the error text of the model or the endpoint; "" if there is none."""
    return str(error)[:MAX_REASON] if isinstance(error, (Refused, StreamError)) else ""


def _kind(error: Exception) -> str:
    if isinstance(error, Refused):
        return error.kind
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connection refused"
    if isinstance(error, (aiohttp.ClientError, OSError)):
        return "connection lost"
    return type(error).__name__
