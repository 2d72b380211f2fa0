"""The parts that all connections of clients share: limits, budgets, and the connections to instances."""

from __future__ import annotations

from dataclasses import dataclass

from torchmoor.config.limits import LimitSettings
from torchmoor.config.websocket import WebSocketSettings
from torchmoor.proxy.http.arriving import ArrivingBodies
from torchmoor.proxy.http.outgoing import ReplayBudget
from torchmoor.proxy.http.spool import Spool
from torchmoor.proxy.http.upstream import Connector


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionParts:
    """What all connections of clients share.

    max_connections: client connections that the limit of open files allows. arriving: bodies that are not whole yet.
    spool: keeps long bodies in files. budget: for bodies that are kept in memory until their answers begin.
    continuations: budget for requests and notes that are kept until marked answers have ended.
    """

    limits: LimitSettings
    websocket: WebSocketSettings
    max_connections: int
    connector: Connector
    arriving: ArrivingBodies
    spool: Spool
    budget: ReplayBudget
    continuations: ReplayBudget
