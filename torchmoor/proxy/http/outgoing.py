"""A request on its way to an instance: the bytes to be written, and the bytes kept for another attempt."""

from __future__ import annotations

from dataclasses import dataclass

from torchmoor.proxy.http.spool import SpooledBody


@dataclass(kw_only=True)
class ByteBudget:
    """Counts the bytes that many requests or connections keep together, and refuses bytes above the limit."""

    max_total_bytes: int
    used_bytes: int = 0

    def try_take(self, num_bytes: int) -> bool:
        """Count bytes as kept, or refuse."""
        if self.used_bytes + num_bytes > self.max_total_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Count bytes as no longer kept."""
        self.used_bytes -= num_bytes


@dataclass(kw_only=True)
class ReplayBudget(ByteBudget):
    """Limits the bytes that are kept so that requests can be sent again: per body, and in total."""

    max_body_bytes: int


SENT_ONCE = ReplayBudget(max_body_bytes=-1, max_total_bytes=0)  # keeps nothing


class OutgoingRequest:
    """A request whose body has arrived completely.

    It can be sent again from its beginning if none of it was written yet, or while its body is kept. file: a long body,
    until `close`.
    """

    __slots__ = ("num_body_bytes", "file", "_budget", "_head", "_body", "_is_kept", "_has_begun")

    def __init__(self, budget: ReplayBudget, body: bytes | SpooledBody) -> None:
        self.file: SpooledBody | None = None
        self._budget = budget
        self._head = b""  # until it is written
        self._has_begun = self._is_kept = False
        if isinstance(body, SpooledBody):
            self.file, self._body, self.num_body_bytes = body, b"", body.num_bytes
        else:
            self._body, self.num_body_bytes = body, len(body)
            self._is_kept = len(body) <= budget.max_body_bytes and budget.try_take(len(body))

    @property
    def can_repeat(self) -> bool:
        return self._is_kept or self.file is not None or not self._has_begun

    @property
    def kept_body(self) -> bytes | None:
        """Return the body if it is kept in memory."""
        return self._body if self._is_kept else None

    def begin(self, head: bytes) -> None:
        self._head = head

    def note_sent(self) -> None:
        """Note that the fast path has written the whole request."""
        self._has_begun = True

    def begin_of_body(self, num_bytes: int) -> bytes:
        """Return a body that was not written yet, or the first bytes of one in a file. Raises OSError."""
        return self._body if self.file is None else self.file.read(0, num_bytes)

    def take(self) -> bytes:
        """Return what is to be written: the head, and the body if it is not in a file."""
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
            self._budget.release(self.num_body_bytes)
            self._body = b""

    def close(self) -> None:
        """Free all that is kept, once the body is not sent any longer; further calls do nothing."""
        self.forget_kept()
        if self.file is not None:
            self.file.close()
            self.file = None
