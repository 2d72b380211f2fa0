"""The observer that the settings configure: the access log, traces, or both."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from torchmoor.config.observe import ObserveSettings
from torchmoor.errors import ConfigError
from torchmoor.proxy.dispatch.record import RequestRecord, record_reply
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.observe.access_log import STDERR, AccessLog

if TYPE_CHECKING:
    from torchmoor.proxy.observe.tracing import SpanTrace, Tracing

logger = logging.getLogger(__name__)


class RequestObserver:
    """Begins traces, and passes finished requests to the access log."""

    def __init__(self, log: AccessLog | None, tracing: Tracing | None) -> None:
        self.log = log
        self._tracing = tracing
        self.is_tracing = tracing is not None

    def begin_trace(self, request: Request) -> SpanTrace | None:
        if self._tracing is None:
            return None
        try:
            return self._tracing.begin(request)
        except Exception:
            logger.exception("request not traced")
            return None

    def on_end(self, record: RequestRecord) -> None:
        if self.log is not None:
            self.log.write(record)

    def on_reply(self, request: Request, request_id: bytes, reply: Reply) -> None:
        if self.log is None:
            return
        try:
            self.log.write(record_reply(request, request_id, reply, monotonic()))
        except Exception:
            logger.exception("request not recorded request_id=%s", request_id.decode())

    def reopen_log(self) -> None:
        if self.log is not None:
            self.log.reopen()


@asynccontextmanager
async def observing(settings: ObserveSettings) -> AsyncIterator[RequestObserver | None]:
    """Run the observer while the context lasts; None if no setting needs it. Raises ConfigError."""
    tracing = log = None
    async with AsyncExitStack() as stack:
        if settings.traces_url:
            tracing = _import_tracing()(settings)
            stack.push_async_callback(asyncio.to_thread, tracing.stop)
        if settings.access_log:
            log = AccessLog(settings)
            log.start()
            stack.push_async_callback(asyncio.to_thread, log.stop)
        yield None if log is None and tracing is None else RequestObserver(log, tracing)


def check_observing(settings: ObserveSettings) -> None:
    """Raise ConfigError if the settings cannot work on this machine; opens and sends nothing."""
    if settings.access_log not in ("", STDERR):
        log = Path(settings.access_log)
        if not os.access(log if log.exists() else log.parent, os.W_OK):
            raise ConfigError(f"observe.access_log: cannot append to {log}: there is no such folder, or no permission")
    if settings.traces_url:
        _import_tracing()


def _import_tracing() -> type[Tracing]:
    try:
        from torchmoor.proxy.observe.tracing import Tracing
    except ImportError as error:
        raise ConfigError(
            "observe.traces_url needs OpenTelemetry, which is not installed: pip install 'torchmoor[otel]'"
        ) from error
    return Tracing
