"""The interface between a client's connection and the fast path (torchmoor/proxy/fast_path)."""

from __future__ import annotations

from typing import Protocol

from torchmoor.proxy.http.answer import ClientSide
from torchmoor.proxy.http.call import Target
from torchmoor.proxy.http.message import Reply, Request


class RunningRequest(Protocol):
    """A client's request that is forwarded and answered: an Exchange, or the fast path's in its place."""

    is_answered: bool

    @property
    def is_request_complete(self) -> bool: ...
    def on_request_piece(self, piece: bytes, *, is_complete: bool) -> None: ...
    def on_client_gone(self) -> None: ...
    def on_client_write_paused(self, is_paused: bool) -> None: ...
    def on_target_down(self, target: Target) -> None: ...
    def expire(self, refusal: Reply) -> None: ...
    def fault(self, refusal: Reply) -> None: ...


class FastClient(ClientSide, Protocol):
    """A client's connection. exchange: the request that is running there."""

    exchange: RunningRequest | None


class FastPath(Protocol):
    """Serves some requests in fewer steps, with the same result."""

    def try_send(self, client: FastClient, request: Request, body: bytes) -> bool:
        """Forward a whole request as the client's exchange, or change nothing and return False."""
        ...

    def may_take(self, request: Request) -> bool:
        """Return True if it is worth waiting for one more read of the request's body."""
        ...
