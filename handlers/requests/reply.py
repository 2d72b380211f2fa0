"""The reply to one request: the service's threads write it, the pump reads it.

A reply is whole (status, headers, body at once) or a stream (headers, then pieces, then an end). Any thread may write;
only the pump reads. A cancelled reply, whose client has left or whose deadline has passed, is answered at once with the
reason; later writes are dropped.
"""

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from handlers.errors import ClientGone, HandlerError, InternalError, SessionGone, TurnTimedOut
from handlers.requests.continuation import Continuation
from torchmoor.wire.continuation import PieceKind, mark_piece

logger = logging.getLogger(__name__)
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class WholeReply:
    """A complete answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class ReplyPieces:
    """The bytes of a stream since the last `take`. Only the first pieces have `headers`."""

    data: bytes
    is_end: bool
    headers: Mapping[str, str] | None = None


@dataclass(slots=True)
class _Stream:
    headers: Mapping[str, str]
    encode_error: Callable[[HandlerError], bytes]
    fill: Callable[[], None]
    is_marked: bool
    has_more: bool = False
    buffer: bytearray = field(default_factory=bytearray)
    is_begun: bool = False
    is_ended: bool = False


class PendingReply:
    """The answer to one request. wake: called after each change except announcements, so that the pump need not poll.

    request_id: the proxy's id, by which it cancels; inference_id: the client's id. Each is empty if the request has
    none. line: the queue of the request's caller. error: why the request failed, if it did.
    gone: answered instead of an error of the SessionGone family, to clients who know the session as a resource.
    adapter: see `Incoming`.
    fetches_end_at: when its fetches of images are cut, in monotonic seconds. fetch_line: the queue in which they wait;
    None if it has none. received_at: in seconds since 1970.
    choice: the number of the answer, where a request has several.
    may_mark: a stream's pieces may be marked, so that another worker can continue it. continuation: what the client has
    of the answer already.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.request_id = ""
        self.inference_id = ""
        self.line = ""
        self.adapter: str | None = None
        self.error: HandlerError | None = None
        self.gone: HandlerError | None = None
        self.receipts: dict[str, str] = {}  # headers that are added to the writer's
        self.session_stamps: dict[str, str] = {}  # headers of a session that the request has opened, unless it fails
        self.fetches_end_at = math.inf
        self.fetch_line: str | None = None
        self.received_at = 0.0
        self.choice = 0
        self.may_mark = False
        self.continuation: Continuation | None = None
        self.wake = wake
        self._deadline = math.inf
        self._lock = threading.Lock()
        self._whole: WholeReply | None = None
        self._stream: _Stream | None = None
        self._on_cancel: list[Callable[[HandlerError], None]] = []
        self._on_end: list[Callable[[], None]] = []
        self._is_over = False
        self._cancelled: HandlerError | None = None

    @property
    def ids(self) -> str:
        """Both ids, for the log."""
        return f"request_id={self.request_id or '-'} inference_id={self.inference_id or '-'}"

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled is not None

    @property
    def status(self) -> int:
        """The status of the answer: 200 for a stream, 0 before there is an answer."""
        return self._whole.status if self._whole is not None else 200 if self._stream is not None else 0

    @property
    def is_streaming(self) -> bool:
        return self._stream is not None

    @property
    def deadline(self) -> float:
        """When the reply is cancelled, in monotonic seconds."""
        return self._deadline

    def shorten_deadline(self, deadline: float) -> float:
        """Set a deadline in monotonic seconds, unless there is an earlier one. Return the deadline in effect.

        The pump cancels a late reply, so no stage of the work needs a clock.
        """
        with self._lock:
            self._deadline = min(self._deadline, deadline)
            return self._deadline

    def on_cancel(self, action: Callable[[HandlerError], None]) -> None:
        """Register an action that is called once with the reason when the reply is cancelled, or now if it is.

        Actions must return at once.
        """
        with self._lock:
            self._on_cancel.append(action)
            reason = self._cancelled
        if reason is not None:
            action(reason)

    def on_end(self, action: Callable[[], None]) -> None:
        """Register an action that is called once when the answer is complete, failed or cancelled, or now if it is.

        Actions must return at once.
        """
        with self._lock:
            if not self._is_over:
                self._on_end.append(action)
                return
        action()

    def _tell_end(self) -> None:
        """Call the actions for the end, the first time only. Not under the lock."""
        with self._lock:
            actions, self._on_end, self._is_over = self._on_end, [], True
        for action in actions:
            action()

    def cancel(self, reason: HandlerError | None = None) -> None:
        """Cancel the answer, even if it is ready. The first reason counts. The pump, or the service's end."""
        self._end(reason or ClientGone("the client left, or the request was cancelled"), even_if_ready=True)

    def expire(self, now: float) -> None:
        """Cancel if the deadline has passed and the answer is not ready. Pump only."""
        if now >= self._deadline:
            self._end(TurnTimedOut("the answer was not ready before the request's deadline"), even_if_ready=False)

    def _end(self, reason: HandlerError, *, even_if_ready: bool) -> None:
        self._fill()
        with self._lock:
            stream = self._stream
            is_ready = self._whole is not None or (stream is not None and stream.is_ended)
            if self._cancelled is not None or (is_ready and not even_if_ready):
                return
            self._cancelled = self.error = reason
            actions = list(self._on_cancel)
            if stream is not None and stream.is_begun:
                if not stream.is_ended:
                    self._add(stream, stream.encode_error(reason), kind=_kind_of(reason))
            else:
                self._stream = None
                self._whole = WholeReply(reason.status, reason.headers(), reason.body())
        self.wake()
        for action in actions:
            action(reason)
        self._tell_end()

    def raise_if_cancelled(self) -> None:
        """Raise the reason if the reply is cancelled. Workers call this between two steps."""
        if self._cancelled is not None:
            raise self._cancelled

    def finish(self, headers: Mapping[str, str], body: bytes, status: int = 200) -> None:
        with self._lock:
            if self._cancelled is not None:
                return
            assert self._stream is None
            stamps = self.session_stamps if status < 300 else {}
            self._whole = WholeReply(status, {**headers, **self.receipts, **stamps}, body)
        self.wake()
        self._tell_end()

    def finish_json(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        """Write a value as the whole answer."""
        self.finish({**JSON, **(headers or {})}, json.dumps(value).encode())

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Fail the reply with the error that the block raises; log an error that is not for the client."""
        try:
            yield
        except HandlerError as error:
            self.fail(error)
        except Exception:
            logger.exception("request failed %s", self.ids)
            self.fail(InternalError("the request could not be handled; the worker's log has the reason"))

    def fail(self, error: HandlerError) -> None:
        """Write an error as the whole answer, or as the end of a stream that has begun, in the stream's form."""
        if self.gone is not None and isinstance(error, SessionGone):
            error = self.gone
        self.error = self.error or error
        stream = self._stream
        if stream is not None:
            self._fill()
            self._write(stream.encode_error(error), "", _kind_of(error))
        else:
            self.finish(error.headers(), error.body(), error.status)

    def begin(
        self,
        headers: Mapping[str, str],
        encode_error: Callable[[HandlerError], bytes],
        fill: Callable[[], None] = lambda: None,
        *,
        is_marked: bool = False,
    ) -> None:
        """Begin a stream; its first piece must follow.

        encode_error: encodes the end of a stream that fails. fill: writes the pieces that were announced; called by the
        thread that needs them. is_marked: mark the pieces (see torchmoor/wire/continuation.py).
        """
        with self._lock:
            if self._cancelled is None:
                self._stream = _Stream(
                    {**headers, **self.receipts, **self.session_stamps}, encode_error, fill, is_marked
                )

    def announce(self) -> None:
        """Note that the stream's `fill` has pieces to write. The caller wakes the reader, for many replies at once."""
        stream = self._stream
        if stream is not None:
            stream.has_more = True

    def _fill(self) -> None:
        """Write what was announced. Not under the lock."""
        stream = self._stream
        if stream is None or not stream.has_more:
            return
        stream.has_more = False
        try:
            stream.fill()
        except Exception:
            logger.exception("answer could not be encoded %s", self.ids)
            self._end(
                InternalError("the answer could not be encoded; the worker's log has the reason"), even_if_ready=True
            )

    def write(self, data: bytes, note: str = "", *, is_end: bool = False) -> None:
        """Write a piece. note: for its mark.

        Wakes the reader at the end only: the engine wakes it once for all pieces of a step.
        """
        self._write(data, note, PieceKind.END if is_end else PieceKind.PART)

    def _write(self, data: bytes, note: str, kind: PieceKind) -> None:
        with self._lock:
            if self._cancelled is not None:
                return
            assert self._stream is not None
            if self._stream.is_ended:
                return
            self._add(self._stream, data, note, kind)
        if kind is not PieceKind.PART:
            self.wake()
            self._tell_end()

    @staticmethod
    def _add(stream: _Stream, data: bytes, note: str = "", kind: PieceKind = PieceKind.PART) -> None:
        """Add a piece to the buffer. Under the lock."""
        is_end = kind is not PieceKind.PART
        if stream.is_marked and (data or note or is_end):
            data = mark_piece(data, note, kind)
        stream.buffer += data
        stream.is_ended = is_end

    def is_urgent(self) -> bool:
        """Return True if a whole answer, or the beginning or end of a stream, is ready."""
        stream = self._stream
        return self._whole is not None or (stream is not None and (stream.is_ended or not stream.is_begun))

    def has_news(self) -> bool:
        stream = self._stream
        return self.is_urgent() or (stream is not None and (stream.has_more or bool(stream.buffer)))

    def take(self, max_bytes: int) -> WholeReply | ReplyPieces | None:
        """Return what is ready, or None; at most `max_bytes` of a stream. Pump only.

        The end of a stream is never returned with its headers.
        """
        self._fill()
        with self._lock:
            if self._whole is not None:
                return self._whole
            stream = self._stream
            if stream is None:
                return None
            data = bytes(stream.buffer[:max_bytes])
            del stream.buffer[:max_bytes]
            if not stream.is_begun:
                stream.is_begun = True
                return ReplyPieces(data, False, stream.headers)
            return ReplyPieces(data, stream.is_ended and not stream.buffer)


def _kind_of(error: HandlerError) -> PieceKind:
    """Say whether another worker may continue a stream that ends with this error."""
    return PieceKind.FAILURE if isinstance(error, InternalError) else PieceKind.END
