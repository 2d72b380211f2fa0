"""A request that waits for a model."""

import threading
from collections.abc import Callable

from handlers.errors import HandlerError
from handlers.many.model import ModelLease


class ModelTicket:
    """A request for a model, which gets a lease or an error, once.

    until: when the request stops waiting; infinite for loads that no request waits for.
    """

    def __init__(
        self, on_ready: Callable[[ModelLease], None], on_failed: Callable[[HandlerError], None], until: float
    ) -> None:
        self.until = until
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._is_over = False
        self._lock = threading.Lock()

    def end(self) -> bool:
        """Suppress both callbacks from now on. Returns False if the ticket had ended before."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
            return is_first

    def hand_over(self, lease: ModelLease) -> None:
        """Pass the lease on, or release it if the ticket has ended."""
        if not self.end():
            lease.release()
            return
        try:
            self._on_ready(lease)
        except Exception:
            lease.release()
            raise

    def fail(self, error: HandlerError) -> None:
        if self.end():
            self._on_failed(error)
