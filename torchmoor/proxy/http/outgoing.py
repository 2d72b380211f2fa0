"""A request on its way to an instance: what is still to be written, and what is kept to send it again."""

from __future__ import annotations

from dataclasses import dataclass

from torchmoor.proxy.http.message import Request


@dataclass(kw_only=True)
class ReplayBudget:
    """Limits the bytes of bodies that are kept for a second attempt, over all requests."""

    max_body_bytes: int
    max_total_bytes: int
    used_bytes: int = 0

    def try_take(self, num_bytes: int) -> bool:
        """Count bytes as kept, or refuse."""
        if self.used_bytes + num_bytes > self.max_total_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Count bytes as no longer kept."""
        self.used_bytes -= num_bytes


# The limit of a body without a declared length while its request waits for a target: the queue does not count it.
MAX_WAITING_CHUNKED_BYTES = 65_536
SENT_ONCE = ReplayBudget(max_body_bytes=-1, max_total_bytes=0)  # keeps nothing


class WholeRequest:
    """A request that was received whole at once, as most are; the others are an OutgoingRequest."""

    __slots__ = ("num_body_bytes", "_budget", "_head", "_body", "_is_kept", "_has_begun")

    is_complete = True
    must_pause = False

    def __init__(self, budget: ReplayBudget, body: bytes) -> None:
        """body: all of it, of declared length."""
        num_bytes = len(body)
        self.num_body_bytes = num_bytes
        self._budget = budget
        self._body = body
        self._head = b""  # until it is written
        self._is_kept = num_bytes <= budget.max_body_bytes and budget.try_take(num_bytes)
        self._has_begun = False

    @property
    def can_repeat(self) -> bool:
        return self._is_kept or not self._has_begun

    def begin(self, head: bytes) -> None:
        self._head = head

    def note_sent(self) -> None:
        """Note that the fast path has written the whole request."""
        self._has_begun = True

    def gathered(self) -> bytes:
        return self._body

    def take(self) -> bytes:
        head = self._head
        if not head:
            return b""
        self._head = b""
        self._has_begun = True
        data = head + self._body
        if not self._is_kept:
            self._body = b""
        return data

    def forget_kept(self) -> None:
        if self._is_kept:
            self._is_kept = False
            self._budget.give_back(self.num_body_bytes)
            self._body = b""


class OutgoingRequest:
    """Collects the pieces of a request between two writes.

    It can be sent from its beginning again while nothing of it was written, or while its whole body is kept.
    """

    def __init__(self, request: Request, budget: ReplayBudget, piece: bytes) -> None:
        """piece: what was received of the body with the head."""
        num_bytes = len(piece)
        self.is_complete = False
        self.num_body_bytes = num_bytes
        self._budget = budget
        self._is_chunked = request.layout.is_chunked
        self._head = b""  # until it is written
        self._pieces = [piece] if piece else []  # those that are kept, then those that wait to be written
        self._num_written = 0  # of the pieces here
        self._has_begun = self._has_ended = False  # as the instance sees it
        # Bytes of the pieces that are counted as kept; None once the beginning is gone.
        is_small = (request.content_length or num_bytes) <= budget.max_body_bytes
        self._is_checked = request.body_check is not None  # at its end; it takes nothing of the budget before
        self._num_kept = num_bytes if is_small and not self._is_checked and budget.try_take(num_bytes) else None

    @property
    def can_repeat(self) -> bool:
        """True while the request can be sent from its beginning."""
        return self._num_kept is not None or not self._has_begun

    @property
    def must_pause(self) -> bool:
        """True if no more is to be read while the request waits.

        A body of declared length is counted by the queue, and read on so that a client that leaves is noticed.
        """
        return self._is_chunked and not self.is_complete and self.num_body_bytes >= MAX_WAITING_CHUNKED_BYTES

    def begin(self, head: bytes) -> None:
        """Start, or start again, with this head; what was received of the body follows it."""
        self._head = head
        self._has_begun = self._has_ended = False
        self._num_written = 0

    def add(self, piece: bytes) -> None:
        num_bytes = len(piece)
        self.num_body_bytes += num_bytes
        self._pieces.append(piece)
        if self._num_kept is not None:
            budget = self._budget
            if self.num_body_bytes <= budget.max_body_bytes and budget.try_take(num_bytes):
                self._num_kept += num_bytes
            else:
                self.forget_kept()

    def gathered(self) -> bytes:
        """Return the body as far as it was received, before any of it was written."""
        return b"".join(self._pieces)

    def end(self) -> None:
        self.is_complete = True
        num_bytes, budget = self.num_body_bytes, self._budget
        if self._is_checked and num_bytes <= budget.max_body_bytes and budget.try_take(num_bytes):
            self._num_kept = num_bytes

    def take(self) -> bytes:
        """Return what is to be written now, in one piece; b"" for nothing."""
        pieces = self._pieces[self._num_written :]
        if self._is_chunked:
            pieces = self._in_chunks(pieces)
        if self._num_kept is None:
            self._pieces.clear()
        else:
            self._num_written = len(self._pieces)
        if self._head:
            pieces.insert(0, self._head)
            self._head = b""
            self._has_begun = True
        return b"".join(pieces)

    def _in_chunks(self, pieces: list[bytes]) -> list[bytes]:
        chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
        if self.is_complete and not self._has_ended:
            self._has_ended = True
            chunks.append(b"0\r\n\r\n")
        return chunks

    def forget_kept(self) -> None:
        """Free what is kept: the request will not be sent again."""
        num_kept, self._num_kept = self._num_kept, None
        if num_kept is not None:
            self._budget.give_back(num_kept)
            del self._pieces[: self._num_written]
            self._num_written = 0
