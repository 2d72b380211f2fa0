"""Log of faults that repeat: at most one line per minute and kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

INTERVAL_S = 60.0


class FaultLog:
    """Logs the first fault of a kind at once. Later ones within a minute are only counted; the next line says how many.

    endpoint: each line names it and the request; None: the faults concern no single endpoint. clock: seconds.
    """

    def __init__(
        self, logger: logging.Logger, endpoint: str | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._logger = logger
        self._endpoint = endpoint
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._num_left_out: dict[str, int] = {}

    def add(self, kind: str, fault: Exception, *, inference_id: str = "", has_trace: bool = False) -> None:
        """Log a fault, or count it. kind: one of a fixed set. has_trace: our own fault; log an ERROR with the trace."""
        now = self._clock()
        if now - self._logged_at.get(kind, -INTERVAL_S) < INTERVAL_S:
            self._num_left_out[kind] = self._num_left_out.get(kind, 0) + 1
            return
        self._logged_at[kind] = now
        place = "" if self._endpoint is None else f"endpoint={self._endpoint} inference_id={inference_id} "
        self._logger.log(
            logging.ERROR if has_trace else logging.WARNING,
            "%s %sleft_out=%d error=%s",
            kind,
            place,
            self._num_left_out.pop(kind, 0),
            str(fault) or type(fault).__name__,  # a time-out has no text
            exc_info=fault if has_trace else None,
        )
