"""What all connections of clients and their exchanges share."""

from __future__ import annotations

from dataclasses import dataclass

from torchmoor.proxy.http.outgoing import ReplayBudget
from torchmoor.proxy.http.upstream import Connector


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketTimes:
    """Times of WebSocket connections, in seconds."""

    ping_interval_s: float
    ping_timeout_s: float
    idle_timeout_s: float
    max_lifetime_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpMeans:
    """Lengths in bytes, times in seconds.

    budget: of bodies that are kept until their answers begin. continuations: of requests and notes that are kept until
    marked answers have ended.
    """

    connector: Connector
    budget: ReplayBudget
    continuations: ReplayBudget
    max_connections: int
    max_header_bytes: int
    max_error_body_bytes: int
    header_timeout_s: float
    body_timeout_s: float
    keep_alive_timeout_s: float
    socket_times: SocketTimes
