"""One answer on its way from the service's threads to the pump.

A reply is whole (status, headers, body at once) or a stream (headers, then pieces, then an end). Writers call from
any thread; the pump alone reads. When the client has gone, `is_cancelled` is set and what is still written is dropped.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from handlers.errors import HandlerError


@dataclass(frozen=True, slots=True)
class Whole:
    """A complete answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a stream has to say since the last look. `headers` are set the first time only."""

    data: bytes
    is_end: bool
    headers: Mapping[str, str] | None = None


@dataclass(slots=True)
class _Stream:
    headers: Mapping[str, str]
    encode_error: Callable[[HandlerError], bytes]
    buffer: bytearray = field(default_factory=bytearray)
    is_begun: bool = False
    is_ended: bool = False


class Reply:
    """wake: called after each change, so that the pump need not poll."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._whole: Whole | None = None
        self._stream: _Stream | None = None
        self._on_cancel: Callable[[], None] | None = None
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    @property
    def is_streaming(self) -> bool:
        return self._stream is not None

    def on_cancel(self, action: Callable[[], None]) -> None:
        """Called once, when the client leaves; at once if it has left already."""
        with self._lock:
            self._on_cancel = action
            is_late = self._is_cancelled
        if is_late:
            action()

    def cancel(self) -> None:
        """The client has gone. Pump only."""
        with self._lock:
            self._is_cancelled = True
            action = self._on_cancel
        if action is not None:
            action()

    def finish(self, headers: Mapping[str, str], body: bytes, status: int = 200) -> None:
        """The whole answer."""
        with self._lock:
            assert self._stream is None
            self._whole = Whole(status, headers, body)
        self._wake()

    def fail(self, error: HandlerError) -> None:
        """The whole answer is an error. A stream that has begun ends with an error in its own form instead."""
        stream = self._stream
        if stream is not None:
            self.write(stream.encode_error(error), is_end=True)
        else:
            self.finish(error.headers(), error.body(), error.status)

    def begin(self, headers: Mapping[str, str], encode_error: Callable[[HandlerError], bytes]) -> None:
        """The answer is a stream. encode_error: how it says that it failed, should it come to that."""
        with self._lock:
            self._stream = _Stream(headers, encode_error)
        self._wake()

    def write(self, data: bytes, is_end: bool = False) -> None:
        """A piece of the stream."""
        with self._lock:
            assert self._stream is not None
            if self._stream.is_ended:
                return
            self._stream.buffer += data
            self._stream.is_ended = is_end
        self._wake()

    def has_news(self) -> bool:
        with self._lock:
            stream = self._stream
            return self._whole is not None or (
                stream is not None and (bool(stream.buffer) or stream.is_ended or not stream.is_begun)
            )

    def take(self, max_bytes: int) -> Whole | Pieces | None:
        """What is ready now, or None; of a stream at most `max_bytes`. Pump only.

        The end of a stream never comes with its headers.
        """
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
                return Pieces(data, False, stream.headers)
            return Pieces(data, stream.is_ended and not stream.buffer)
