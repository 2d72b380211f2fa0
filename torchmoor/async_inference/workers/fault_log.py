"""Log of faults that repeat: at most one line per minute and kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

INTERVAL_S = 60.0


class FaultLog:
    """Logs the first fault of a kind at once. Later ones within a minute are only counted; the next line says how many.

    endpoint: named in each line. clock: seconds.
    """

    def __init__(self, logger: logging.Logger, endpoint: str, clock: Callable[[], float] = monotonic) -> None:
        self._logger = logger
        self._endpoint = endpoint
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._num_left_out: dict[str, int] = {}

    def add(self, kind: str, fault: Exception, *, inference_id: str = "", has_trace: bool = False) -> None:
        """Log a fault, or count it. kind: one of a fixed set. has_trace: log the exception's trace too."""
        now = self._clock()
        if now - self._logged_at.get(kind, -INTERVAL_S) < INTERVAL_S:
            self._num_left_out[kind] = self._num_left_out.get(kind, 0) + 1
            return
        self._logged_at[kind] = now
        self._logger.warning(
            "%s endpoint=%s inference_id=%s left_out=%d error=%s",
            kind,
            self._endpoint,
            inference_id,
            self._num_left_out.pop(kind, 0),
            fault,
            exc_info=fault if has_trace else None,
        )
