"""Reader of streams of Text Generation Inference, LMI and OpenAI's chat completions, from chunks split anywhere.

Each line shows its dialect: `data:` begins a server-sent event, `{` a JSON line, and a bracket alone a JSON value of
several lines, as TorchServe writes a handler's dictionary. This module needs only the standard library;
torchmoor.clients.events reads boto3's streams.

    for piece in read_stream(response.iter_content(None)):
        print(piece.text, end="", flush=True)
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterable, Iterator, Sequence
from typing import Any

from torchmoor.clients.errors import StreamCut, StreamError, UnreadableStream
from torchmoor.clients.pieces import Piece, StreamEvent, Usage, read_value
from torchmoor.wire.held_text import num_held
from torchmoor.wire.json_values import parse_json

MAX_EVENT_BYTES = 16 << 20  # a last event may repeat the whole answer
STOP_SEQUENCE = "stop_sequence"  # the finish reason if the reader ended the answer

_LINE_END = re.compile(rb"[\r\n]")
_DONE = "[DONE]"
_BEGINNINGS, _ENDINGS = ("{", "["), ("}", "]")  # lines of a value of several lines; those between are indented
_FIELDS = ("event", "id", "retry")  # of server-sent events, which no dialect needs


def read_stream(chunks: Iterable[bytes], stop: Sequence[str] = ()) -> Generator[Piece, None, None]:
    """Yield the pieces of an answer, each as soon as its bytes arrive.

    Closes `chunks` (if it has `close`) at the end, and when the caller stops reading, so that the model stops too.
    stop: the answer ends before the first of these. Raises StreamError, whose `received` is the text so far.
    """
    reader = StreamReader(stop)
    try:
        for chunk in chunks:
            yield from reader.feed(chunk)
            if reader.is_stopped:
                return
        yield from reader.close()
    except StreamError as error:
        error.received = reader.text
        raise
    finally:
        close = getattr(chunks, "close", None)
        if close is not None:
            close()


async def aread_stream(chunks: AsyncIterable[bytes], stop: Sequence[str] = ()) -> AsyncIterator[Piece]:
    """Yield the pieces of an asynchronous HTTP client's chunks, as `read_stream`."""
    reader = StreamReader(stop)
    try:
        async for chunk in chunks:
            for piece in reader.feed(chunk):
                yield piece
            if reader.is_stopped:
                return
        for piece in reader.close():
            yield piece
    except StreamError as error:
        error.received = reader.text
        raise
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()


class StreamReader:
    """Turns bytes into pieces, without I/O.

    text: of all pieces so far. finish_reason, usage: of the last piece that had them. is_stopped: a stop sequence has
    ended the answer.
    """

    def __init__(self, stop: Sequence[str] = (), max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()  # the beginning of a line
        self._is_after_return = False  # the last line ended with CR: a following LF belongs to it
        self._data: list[str] = []  # of an event or a value whose JSON is not complete yet
        self._num_chars = 0  # of _data
        self._is_in_value = False  # of several lines
        self._cutter = StopCutter(stop)
        self._texts: list[str] = []
        self._is_complete = False
        self._is_first = True
        self._is_read = False  # an event was understood

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def is_stopped(self) -> bool:
        return self._cutter.is_over

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Yield the pieces that these bytes complete; read them all before the next `feed`. Raises StreamError."""
        begin = 0
        if self._is_after_return and data:
            self._is_after_return = False
            begin = data[:1] == b"\n"
        while found := _LINE_END.search(data, begin):
            self._keep(data[begin : found.start()])
            begin = found.end()
            if data[found.start()] == ord("\r"):
                if begin == len(data):
                    self._is_after_return = True
                elif data[begin] == ord("\n"):
                    begin += 1
            yield from self._read_line()
        self._keep(data[begin:])

    def close(self) -> Iterator[Piece]:
        """Yield what the end of the bytes completes. Raises StreamCut if the answer is not complete, and
        UnreadableStream if the bytes are not the beginning of an answer either."""
        last = self._line.decode(errors="replace").strip()
        try:
            if self._line:
                yield from self._read_line()
            if self._data:
                raise UnreadableStream("the last event is not complete")
        except UnreadableStream as error:
            if self._is_read or self._data or _may_begin_event(last):
                raise StreamCut("the stream ended within an event") from error
            raise
        if not self._is_complete and not self.is_stopped:
            raise StreamCut("the stream ended before the answer was complete")
        yield from self._emit(Piece(self._cutter.flush()))

    def _keep(self, data: bytes) -> None:
        self._line += data
        if len(self._line) + self._num_chars > self._max_event_bytes:
            raise UnreadableStream(f"an event of the stream is longer than {self._max_event_bytes} bytes")

    def _read_line(self) -> Iterator[Piece]:
        data, self._line = bytes(self._line), bytearray()
        if self.is_stopped:
            return
        try:
            line = data.decode()
        except UnicodeDecodeError as error:
            raise UnreadableStream("the stream is not UTF-8") from error
        if self._is_first:
            self._is_first, line = False, line.removeprefix("\ufeff")
        if self._is_in_value:
            yield from self._read_in_value(line)
        elif not line.strip():
            if self._data:
                raise UnreadableStream("an event's data is not JSON")
        elif line.rstrip() in _BEGINNINGS:
            self._is_in_value = True
            self._add(line)
        elif line.lstrip()[0] in "{[":
            yield from self._understand(_parse(line))
        else:
            yield from self._read_field(line)

    def _read_in_value(self, line: str) -> Iterator[Piece]:
        """Read a line of a JSON value, which is parsed once at its end."""
        self._add(line)
        if line.rstrip() in _ENDINGS:
            self._is_in_value = False
            yield from self._understand(_parse(self._take()))

    def _add(self, data: str) -> None:
        self._data.append(data)
        self._num_chars += len(data)

    def _take(self) -> str:
        """Return the data so far, and forget it."""
        data = "\n".join(self._data)
        self._data.clear()
        self._num_chars = 0
        return data

    def _read_field(self, line: str) -> Iterator[Piece]:
        """Read a line of a server-sent event. Its JSON is parsed once complete, since some servers omit the empty line
        after it."""
        name, _, value = line.partition(":")
        if name == "data":
            self._add(value.removeprefix(" "))
            data = "\n".join(self._data)
            if not data.strip() or data.strip() == _DONE:
                self._take()
                self._is_complete |= data.strip() == _DONE
            elif data.rstrip()[-1] in "}]" and (value_read := parse_json(data)) is not None:
                self._take()
                yield from self._understand(value_read)
        elif name and name not in _FIELDS:  # a line without a name is a comment
            raise UnreadableStream(f"this is not a stream of events or JSON lines: {line[:60]!r}")

    def _understand(self, value: Any) -> Iterator[Piece]:
        event: StreamEvent = read_value(value)
        self._is_read = True
        piece = event.piece
        if event.whole and not self._texts:
            piece = dataclasses.replace(piece, text=event.whole)
        self._is_complete |= event.is_end or event.has_no_end
        text = self._cutter.feed(piece.text)
        if self.is_stopped:
            piece = dataclasses.replace(piece, finish_reason=STOP_SEQUENCE)
        elif piece.finish_reason is not None or event.is_end:
            text += self._cutter.flush()
        yield from self._emit(dataclasses.replace(piece, text=text))

    def _emit(self, piece: Piece) -> Iterator[Piece]:
        if piece == Piece():
            return
        self._texts.append(piece.text)
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.usage = piece.usage or self.usage
        yield piece


def _may_begin_event(line: str) -> bool:
    """Return whether an unreadable line may be the beginning of a valid one."""
    if line[:1] in ("{", "["):
        return parse_json(line) is None
    name = line.partition(":")[0]
    return any(field.startswith(name) for field in ("data", *_FIELDS))


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableStream("a line of the stream is not JSON") from error


class StopCutter:
    """Passes text on up to the first complete stop sequence, which may span pieces.

    It holds back text that may be the beginning of a stop sequence.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [sequence for sequence in stop if sequence]
        self._held = ""
        self.is_over = False

    def feed(self, text: str) -> str:
        """Add text; return what is certain to be part of the answer."""
        if self.is_over:
            return ""
        text = self._held + text
        found = [(at + len(sequence), at) for sequence in self._stop if (at := text.find(sequence)) >= 0]
        if found:
            self.is_over, self._held = True, ""
            return text[: min(found)[1]]
        end = len(text) - max((num_held(text, sequence) for sequence in self._stop), default=0)
        self._held = text[end:]
        return text[:end]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held
