"""Bodies that are still arriving: each is kept until it is whole; their bytes are counted by source and limited.

A long body is kept in a file (see spool.py), and counts the same.

Clients could fill the limit with bodies that they do not finish, or whose signatures are forged. So at the limit, no
new body is refused; the ones that arrive most slowly, from the sources with the most bytes, are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address

from torchmoor.proxy.http.message import Request
from torchmoor.proxy.http.spool import Spool, SpooledBody, SpoolFull

MANY = 256  # with more bodies than this, each search drops bodies of at least a 16th of the limit


class ArrivingBody:
    """A body as far as it was received, and when its first bytes came, in seconds of the clock.

    drop: answers the request and closes its connection; called at most once.
    """

    __slots__ = ("source", "began_at", "num_bytes", "drop", "_data", "_file", "_spool")

    def __init__(self, source: str, drop: Callable[[], None], spool: Spool | None = None) -> None:
        """spool: where the body may be kept; None: only in memory."""
        self.source = source
        self.began_at = 0.0
        self.num_bytes = 0
        self.drop = drop
        self._data = bytearray()
        self._file: SpooledBody | None = None
        self._spool = spool

    def append(self, piece: bytes) -> None:
        """Keep more of the body. Raises SpoolFull."""
        self.num_bytes += len(piece)
        spool = self._spool
        if spool is not None and self.num_bytes > spool.max_kept_bytes:
            self._spool = None
            self._file = spool.try_open()
            if self._file is not None:
                self._file.append(self._data)
                self._data = bytearray()
        if self._file is None:
            self._data += piece
        else:
            self._file.append(piece)

    def finish(self, piece: bytes) -> bytes | SpooledBody:
        """Return the whole body; piece: its last bytes. Raises SpoolFull."""
        if self._file is None:
            return b"".join((self._data, piece))
        self._file.append(piece)
        file, self._file = self._file, None
        return file

    def discard(self) -> None:
        """Free what is kept; further calls do nothing."""
        self._data = bytearray()
        if self._file is not None:
            self._file.close()
            self._file = None


class ArrivingBodies:
    """All arriving bodies. num_bytes: their total, which exceeds max_bytes only within `add`."""

    def __init__(self, max_bytes: int, *, clock: Callable[[], float], on_dropped: Callable[[str], None]) -> None:
        """clock: monotonic seconds. on_dropped: called for each body that is dropped, with the setting of the limit."""
        self.num_bytes = 0
        self._on_dropped = on_dropped
        self._max_bytes = max_bytes
        self._clock = clock
        self._bodies: dict[ArrivingBody, None] = {}  # in order of arrival
        self._by_source: Counter[str] = Counter()

    def add(self, body: ArrivingBody, piece: bytes) -> None:
        """Keep a piece that has arrived and is not empty. Drops bodies at the limit, perhaps this one."""
        if body not in self._bodies:
            self._bodies[body] = None
            body.began_at = self._clock()
        num_bytes = len(piece)
        self._by_source[body.source] += num_bytes
        self.num_bytes += num_bytes
        try:
            body.append(piece)
        except SpoolFull as error:
            self._drop(body, error.setting)
        if self.num_bytes > self._max_bytes:
            self._make_room()

    def take(self, body: ArrivingBody, piece: bytes) -> bytes | SpooledBody:
        """Return the whole body and stop counting it; piece: its last bytes. Raises SpoolFull."""
        self._remove(body)
        try:
            return body.finish(piece)
        except SpoolFull as error:
            body.discard()
            self._on_dropped(error.setting)
            raise

    def discard(self, body: ArrivingBody) -> None:
        """Free a body and stop counting it; further calls do nothing."""
        self._remove(body)
        body.discard()

    def _remove(self, body: ArrivingBody) -> None:
        if body in self._bodies:
            del self._bodies[body]
            num_bytes = body.num_bytes
            self.num_bytes -= num_bytes
            self._by_source[body.source] -= num_bytes
            if not self._by_source[body.source]:
                del self._by_source[body.source]

    def _make_room(self) -> None:
        """Drop bodies until there is room: first those with the most bytes at their source and the lowest rate."""
        now, by_source = self._clock(), self._by_source.copy()
        goal = self._max_bytes - (self._max_bytes // 16 if len(self._bodies) > MANY else 0)

        def cost(body: ArrivingBody) -> float:
            return by_source[body.source] * (now - body.began_at) / body.num_bytes

        for body in sorted(self._bodies, key=cost, reverse=True):
            if self.num_bytes <= goal:
                break
            self._drop(body, "max_arriving_bytes")

    def _drop(self, body: ArrivingBody, setting: str) -> None:
        self.discard(body)
        self._on_dropped(setting)
        body.drop()


def counted_source(request: Request, host: str) -> str:
    """Return for whom a request's body counts: a caller whose credentials are verified, else the client's address."""
    check = request.body_check
    is_verified = check is None or check.is_head_verified
    return request.principal if request.principal and is_verified else source_of(host)


def source_of(host: str) -> str:
    """Return the source of a client's address: the /64 network of an IPv6 address, else the address."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    mapped = address.ipv4_mapped
    return str(IPv6Address(int(address) >> 64 << 64)) if mapped is None else str(mapped)
