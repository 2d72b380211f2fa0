"""The settings, caches and budgets that all connections of clients share."""

from __future__ import annotations

from dataclasses import dataclass

from torchmoor.config.limits import LimitSettings
from torchmoor.config.websocket import WebSocketSettings
from torchmoor.proxy.http.arriving import ArrivingBodies
from torchmoor.proxy.http.outgoing import ReplayBudget
from torchmoor.proxy.http.spool import Spool
from torchmoor.proxy.http.upstream import Connector


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpMeans:
    """Means of the connections.

    max_connections: of clients, which the limit of open files allows. arriving: bodies that are not whole yet. spool:
    has the long ones. budget: of bodies that are kept in memory until their answers begin. continuations: of requests
    and notes that are kept until marked answers have ended.
    """

    limits: LimitSettings
    websocket: WebSocketSettings
    max_connections: int
    connector: Connector
    arriving: ArrivingBodies
    spool: Spool
    budget: ReplayBudget
    continuations: ReplayBudget
