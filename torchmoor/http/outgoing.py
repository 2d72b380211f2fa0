"""A request on its way to an instance: what waits to be written, and what is kept to write it once more."""

from __future__ import annotations

from torchmoor.http.message import Request


class ReplayBudget:
    """Bytes of request bodies kept for a second attempt, over all requests in flight."""

    __slots__ = ("max_body_bytes", "max_total_bytes", "used_bytes")

    def __init__(self, *, max_body_bytes: int, max_total_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_total_bytes = max_total_bytes
        self.used_bytes = 0

    def try_take(self, num_bytes: int) -> bool:
        """Count bytes as kept, or refuse."""
        if self.used_bytes + num_bytes > self.max_total_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """These bytes are kept no more."""
        self.used_bytes -= num_bytes


class OutgoingRequest:
    """Collects the pieces of a request between two writes.

    It can be sent from its beginning again while nothing of it was written, or while its whole body is kept.
    """

    __slots__ = (
        "is_complete",
        "is_chunked",
        "num_body_bytes",
        "framing",
        "_budget",
        "_head",
        "_pending",
        "_kept",
        "_num_kept",
        "_is_written",
    )

    def __init__(self, request: Request, budget: ReplayBudget, piece: bytes, is_complete: bool) -> None:
        """piece: what has come of the body with the head."""
        self.is_complete = is_complete
        self.num_body_bytes = self._num_kept = 0
        self._budget = budget
        self._is_written = False
        self._head: bytes | None = None
        self._pending: list[bytes] = []
        length = request.content_length
        self._kept: list[bytes] | None = None if length is not None and length > budget.max_body_bytes else []
        if length is not None:
            self.is_chunked = False
            self.framing = b"content-length: %d\r\n" % length
        elif request.is_chunked:
            self.is_chunked = True
            self.framing = b"transfer-encoding: chunked\r\n"
        else:
            self.is_chunked = False
            self.framing = b"" if request.method == b"GET" else b"content-length: 0\r\n"
        if piece:
            self.add(piece)

    @property
    def can_repeat(self) -> bool:
        """True while the request can be sent from its beginning."""
        return self._kept is not None or not self._is_written

    def begin(self, head: bytes) -> None:
        """Start, or start again, with this head; what was received of the body so far follows it."""
        self._head = head
        if not self._is_written:
            return
        self._is_written = False
        self._pending = []
        for piece in self._kept or ():
            self._append(piece)
        if self.is_complete and self.is_chunked:
            self._pending.append(b"0\r\n\r\n")

    def add(self, piece: bytes) -> None:
        """The next piece of the body."""
        num_bytes = len(piece)
        self.num_body_bytes += num_bytes
        if self._kept is not None:
            budget = self._budget
            if self.num_body_bytes <= budget.max_body_bytes and budget.try_take(num_bytes):
                self._kept.append(piece)
                self._num_kept += num_bytes
            else:
                self.forget_kept()
        self._append(piece)

    def _append(self, piece: bytes) -> None:
        if self.is_chunked:
            self._pending += (b"%x\r\n" % len(piece), piece, b"\r\n")
        else:
            self._pending.append(piece)

    def end(self) -> None:
        """The body is whole."""
        self.is_complete = True
        if self.is_chunked:
            self._pending.append(b"0\r\n\r\n")

    def take(self) -> bytes | None:
        """What is to be written now, in one piece."""
        head, pending = self._head, self._pending
        if head is not None:
            self._head = None
            data = head + pending[0] if len(pending) == 1 else b"".join((head, *pending))
        elif not pending:
            return None
        else:
            data = pending[0] if len(pending) == 1 else b"".join(pending)
        pending.clear()
        self._is_written = True
        return data

    def forget_kept(self) -> None:
        """The request will not be sent again."""
        if self._num_kept:
            self._budget.give_back(self._num_kept)
            self._num_kept = 0
        self._kept = None
