"""The budgets of a journal: total bytes, sessions and bytes of each endpoint, and bytes of each owner.

KV caches have budgets of their own, so they never prevent the opening of a session: one of all bytes, and one of each
owner's.

Each worker counts what it writes and deletes itself, and corrects the count with each measurement of the store. A
session and its bytes count until its expiry, whichever worker deletes them.
"""

import threading
from collections.abc import Iterator
from heapq import heappop, heappush

from handlers.journal.journal import REMOVED_WITHIN_S, JournalFull, OwnerFull, endpoint_of, has_name
from handlers.settings.journal import JournalSettings

NEVER = 1 << 40  # expiry of bytes that count until they are deleted or the next measurement


class JournalUsage:
    """What a journal holds, by owner and expiry: bytes, open sessions, and bytes of KV caches, in this order."""

    def __init__(self) -> None:
        self.amounts: dict[tuple[str, int], tuple[int, int, int]] = {}

    def add(self, owner: str, expires_at: int, num_bytes: int, num_sessions: int = 0, kv_bytes: int = 0) -> None:
        held = self.amounts.get((owner, expires_at), (0, 0, 0))
        self.amounts[owner, expires_at] = held[0] + num_bytes, held[1] + num_sessions, held[2] + kv_bytes


class _Account:
    """A quantity, of bytes or of sessions, by the second of its expiry. Not thread-safe.

    The amount of a second may be negative: an image of several sessions counts until the expiry of the first one, but
    is deleted with the last one.
    """

    __slots__ = ("_amounts", "_order", "_sum")

    def __init__(self) -> None:
        self._sum = 0
        self._amounts: dict[int, int] = {}
        self._order: list[int] = []  # a heap of the keys

    @property
    def used(self) -> int:
        return max(0, self._sum)

    @property
    def is_empty(self) -> bool:
        return not self._amounts

    def add(self, expires_at: int, amount: int) -> None:
        if expires_at not in self._amounts:
            heappush(self._order, expires_at)
        self._amounts[expires_at] = self._amounts.get(expires_at, 0) + amount
        self._sum += amount

    def expire(self, before: int) -> None:
        """Forget what expired before this time."""
        while self._order and self._order[0] < before:
            self._sum -= self._amounts.pop(heappop(self._order))

    def first(self) -> int | None:
        """Return when the first amount expires; None if none does."""
        while self._order and not self._amounts[self._order[0]]:
            del self._amounts[heappop(self._order)]
        return self._order[0] if self._order and self._order[0] < NEVER else None


class _Holding:
    """Bytes, open sessions, and bytes of KV caches. Not thread-safe."""

    __slots__ = ("accounts", "kv_bytes", "num_bytes", "num_sessions")

    def __init__(self) -> None:
        self.num_bytes, self.num_sessions, self.kv_bytes = self.accounts = _Account(), _Account(), _Account()

    @property
    def is_empty(self) -> bool:
        return all(account.is_empty for account in self.accounts)

    def add(self, expires_at: int, amounts: tuple[int, int, int]) -> None:
        for account, amount in zip(self.accounts, amounts, strict=True):
            if amount:
                account.add(expires_at, amount)

    def expire(self, before: int) -> None:
        for account in self.accounts:
            account.expire(before)


class Budget:
    """Counts against the limits of sessions and bytes in the settings, and max_bytes. Any thread. 0: no limit."""

    def __init__(self, settings: JournalSettings, *, max_bytes: int = 0) -> None:
        self._max_sessions = settings.max_sessions
        self._max_endpoint_bytes = settings.max_endpoint_bytes
        self._max_owner_bytes = settings.max_caller_bytes
        self._max_bytes = max_bytes
        self._max_kv_bytes = settings.max_kv_bytes
        self._max_owner_kv_bytes = settings.max_caller_kv_bytes or settings.max_kv_bytes // 2
        self._lock = threading.Lock()
        self._forget()
        self._since: JournalUsage | None = None  # what was added since a measurement began

    def _forget(self) -> None:
        self._all = _Holding()
        self._endpoints: dict[str, _Holding] = {}
        self._owners: dict[str, _Holding] = {}

    @property
    def used_bytes(self) -> int:
        return self._all.num_bytes.used

    @property
    def num_sessions(self) -> int:
        return self._all.num_sessions.used

    def add(self, owner: str, expires_at: int, num_bytes: int = 0, num_sessions: int = 0, kv_bytes: int = 0) -> None:
        """Add bytes, open sessions, and bytes of KV caches that expire at this time; negative numbers subtract."""
        with self._lock:
            self._add(owner, expires_at, (num_bytes, num_sessions, kv_bytes))
            if self._since is not None:
                self._since.add(owner, expires_at, num_bytes, num_sessions, kv_bytes)

    def _add(self, owner: str, expires_at: int, amounts: tuple[int, int, int]) -> None:
        for holding in self._holdings(owner):
            holding.add(expires_at, amounts)

    def _holdings(self, owner: str) -> Iterator[_Holding]:
        """Yield the counters to which this owner's sessions belong."""
        yield self._all
        yield self._endpoints.setdefault(endpoint_of(owner), _Holding())
        if has_name(owner):
            yield self._owners.setdefault(owner, _Holding())

    def check_kv(self, owner: str, num_bytes: int) -> None:
        """Raise OwnerFull or JournalFull if a part of a KV cache of this size may not be written."""
        with self._lock:
            if owner in self._owners:
                account = self._owners[owner].kv_bytes
                if account.used + num_bytes > self._max_owner_kv_bytes:
                    raise OwnerFull(f"the caller's KV caches hold {account.used} bytes of the journal")
            if self._all.kv_bytes.used + num_bytes > self._max_kv_bytes:
                raise JournalFull(f"all KV caches hold {self._all.kv_bytes.used} bytes of the journal")

    def expire(self, before: int) -> None:
        """Forget the sessions that expired before this time, in seconds since 1970."""
        with self._lock:
            self._all.expire(before)
            for holdings in (self._endpoints, self._owners):
                for name, holding in list(holdings.items()):
                    holding.expire(before)
                    if holding.is_empty:
                        del holdings[name]

    def begin_measurement(self) -> JournalUsage:
        """Return the JournalUsage for a measurement to fill and pass to `replace`.

        It replaces an unfinished measurement.
        """
        with self._lock:
            self._since = JournalUsage()
        return JournalUsage()

    def replace(self, measured: JournalUsage) -> None:
        """Set the counts to the measurement plus the changes since `begin_measurement`.

        A change that the measurement has seen counts twice until the next one.
        """
        with self._lock:
            self._forget()
            for usage in (measured, self._since or JournalUsage()):
                for (owner, expires_at), amounts in usage.amounts.items():
                    self._add(owner, expires_at, amounts)
            self._since = None

    def check(self, owner: str) -> None:
        """Raise OwnerFull or JournalFull if there is no room for another session of this owner."""
        with self._lock:
            if owner in self._owners:
                account = self._owners[owner].num_bytes
                if 0 < self._max_owner_bytes <= account.used:
                    message = (
                        f"the caller's sessions hold {account.used} bytes of the journal, and one caller's may "
                        f"hold {self._max_owner_bytes} (journal.max_caller_bytes)"
                    )
                    raise _full(OwnerFull(message), account)
            self._check_endpoint(endpoint_of(owner))
            account = self._all.num_bytes
            if 0 < self._max_bytes <= account.used:
                message = f"the journal holds {account.used} bytes, the most it may hold (journal.max_bytes)"
                raise _full(JournalFull(message), account)

    def _check_endpoint(self, endpoint: str) -> None:
        if endpoint not in self._endpoints:
            return
        holding = self._endpoints[endpoint]
        if 0 < self._max_sessions <= holding.num_sessions.used:
            message = (
                f"the endpoint has {holding.num_sessions.used} open sessions, the most it may have "
                "(journal.max_sessions)"
            )
            raise _full(JournalFull(message), holding.num_sessions)
        if 0 < self._max_endpoint_bytes <= holding.num_bytes.used:
            message = (
                f"the endpoint's sessions hold {holding.num_bytes.used} bytes of the journal, and one endpoint's may "
                f"hold {self._max_endpoint_bytes} (journal.max_endpoint_bytes)"
            )
            raise _full(JournalFull(message), holding.num_bytes)

    def full(self, message: str) -> JournalFull:
        """Return the error for a store that has no room for another reason."""
        with self._lock:
            return _full(JournalFull(message), self._all.num_bytes)


def _full(error: JournalFull, account: _Account) -> JournalFull:
    first = account.first()
    error.room_at = None if first is None else first + REMOVED_WITHIN_S
    return error
