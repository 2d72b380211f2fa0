"""GET / and what it needs: the page's files, and GET /dashboard.json, which docs/dashboard.md describes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from importlib.resources import files
from pathlib import PurePath
from types import TracebackType
from typing import Any

from aiohttp import web

from torchmoor.admin.dashboard.history import INTERVAL_S, VariantHistory
from torchmoor.admin.dashboard.statuses import InstanceStatuses
from torchmoor.metrics.invocations import Traffic
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.operations import Operations
from torchmoor.proxy.instances.registry import Registry

logger = logging.getLogger(__name__)

# Nothing but this page's own files, and nobody frames it.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


class Dashboard:
    """Use as a context, in which the samples are taken."""

    def __init__(
        self,
        registry: Registry,
        operations: Operations,
        traffic: Iterable[Traffic],
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        """refresh: brings the numbers up to date, where that takes asking other processes."""
        self._refresh = refresh
        self._registry = registry
        self.statuses = InstanceStatuses(registry, operations)
        self._started_at = time.monotonic()
        self._histories = [VariantHistory(each, self._started_at) for each in traffic]
        self._sampling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Dashboard:
        await self.statuses.__aenter__()
        self._sampling = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._sampling is not None
        self._sampling.cancel()
        with suppress(asyncio.CancelledError):
            await self._sampling
        await self.statuses.__aexit__(kind, error, trace)

    def add_to(self, router: web.UrlDispatcher) -> None:
        """The page's addresses."""
        for file in files(__package__).joinpath("static").iterdir():
            kind = KINDS.get(PurePath(file.name).suffix)
            if kind is not None:
                path = "/" if file.name == "index.html" else f"/dashboard/{file.name}"
                router.add_get(path, _answering(file.read_text(encoding="utf-8"), kind))
        router.add_get("/dashboard.json", self._show)

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self._refresh()
                now = time.monotonic()
                for history in self._histories:
                    history.take(now)
            except Exception:
                logger.exception("a sample for the dashboard failed")

    async def _show(self, request: web.Request) -> web.Response:
        await asyncio.gather(self.statuses.refresh(), self._refresh())
        return web.json_response(self.describe(), headers=HEADERS)

    def describe(self) -> dict[str, Any]:
        """All that the page shows."""
        return {
            "version": version("torchmoor"),
            "time": time.time(),
            "uptime_s": round(time.monotonic() - self._started_at, 1),
            "interval_s": INTERVAL_S,
            "has_many_models": any(each.settings.multi_model is not None for each in self._registry.endpoints()),
            "async_endpoints": [each.name for each in self._registry.endpoints() if each.settings.async_inference],
            "autoscaling": describe_scaling(self._registry),
            "variants": [self._describe_variant(history) for history in self._histories],
            "instances": [
                {**describe_instance(instance, self._registry), "status": self.statuses.find(instance.name)}
                for instance in self._registry.instances()
            ],
        }

    def _describe_variant(self, history: VariantHistory) -> dict[str, Any]:
        variant, metrics = history.traffic.variant, history.traffic.metrics
        members = list(variant.pool.members)
        return {
            "endpoint": variant.endpoint,
            "name": variant.name,
            "strategy": variant.settings.routing_strategy,
            "instances": len(members),
            "ready": sum(instance.is_ready for instance in members),
            "desired": None if variant.scale is None else variant.scale.desired,
            "invocations": metrics.invocations,
            "client_errors": metrics.client_errors,
            "server_errors": metrics.server_errors,
            "model_errors": metrics.model_errors,
            "mid_stream_errors": metrics.mid_stream_errors,
            "no_capacity": metrics.no_capacity,
            "retries": metrics.retries,
            "in_flight": sum(instance.outstanding for instance in members),
            "waiting": history.traffic.num_waiting,
            "waiting_turns": dict(history.traffic.waiting_turns),
            "asynchronous": {
                "processed": metrics.async_processed,
                "failed": metrics.async_failures,
                "expired": metrics.async_expired,
                "cancelled": metrics.async_cancelled,
            },
            **history.describe(),
        }


def describe_scaling(registry: Registry) -> list[dict[str, Any]]:
    """Variants whose instances are started and stopped as they are needed: how many, and for what."""
    return [
        {
            "endpoint": variant.endpoint,
            "variant": variant.name,
            "min_capacity": scaling.min_capacity,
            "max_capacity": scaling.max_capacity,
            "desired": scaling.initial_count if variant.scale is None else variant.scale.desired,
            "backlog": 0 if variant.scale is None else variant.scale.backlog,
            "running": len(list(variant.pool.members)),
            "why": "" if variant.scale is None else variant.scale.why,
            "last_start_s": _rounded(variant.last_start_s),
        }
        for endpoint in registry.endpoints()
        for variant in endpoint.variants
        if (scaling := variant.settings.scaling) is not None
    ]


def describe_instance(instance: Instance, registry: Registry) -> dict[str, Any]:
    """An instance as the proxy counts it."""
    return {
        "name": instance.name,
        "endpoint": instance.endpoint,
        "variant": instance.variant,
        "model": instance.model,
        "host": instance.host,
        "port": instance.port,
        "management_port": instance.management_port,
        "metrics_port": instance.metrics_port,
        "state": instance.state.value,
        "is_drained": registry.is_drained(instance.name),
        "is_leaving": registry.is_leaving(instance.name),
        "outstanding": instance.outstanding,
        "capacity": instance.capacity,
        "session_room": instance.session_room,
        "breaker": instance.breaker.state.value,
        "failures_in_a_row": instance.breaker.num_failures,
        "share": round(instance.share, 3),
        "starting_s": _starting_s(instance),
        "last_start_s": _rounded(registry.variant_of(instance).last_start_s),
        "idle_connections": len(instance.idle),
        "source": instance.source or "static",
    }


def describe_discovery(registry: Registry) -> list[dict[str, Any]]:
    """The DNS names that bring instances, and how asking for them goes."""
    return [
        {
            "dns_name": source.dns_name,
            "endpoint": source.endpoint,
            "variant": source.variant,
            "listed": source.num_listed,
            "answer_age_s": _rounded(source.age_s()),
            "failures": source.num_failures,
            "error": source.error,
            "notes": list(source.notes),
        }
        for source in registry.sources.values()
    ]


def _answering(text: str, kind: str) -> Any:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type=kind, charset="utf-8", headers=HEADERS)

    return answer


def _starting_s(instance: Instance) -> float | None:
    """For how long it has been starting; None if it is not, or is not ours."""
    if instance.state is not InstanceState.STARTING or instance.started_at is None:
        return None
    return _rounded(time.monotonic() - instance.started_at)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
