"""The dashboard's routes: GET /, its static files, and GET /dashboard.json, which docs/dashboard.md describes."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from aiohttp import web

from torchmoor import __version__
from torchmoor.admin.dashboard.history import INTERVAL_S, NOW, RANGES, InstanceHistory, VariantHistory, find_gpu
from torchmoor.admin.http import add_routes, get
from torchmoor.admin.statuses import InstanceStatuses
from torchmoor.admin.views import SHOWN_VALUES, describe_instance, describe_scaling
from torchmoor.errors import ApiError, ValidationError
from torchmoor.fault_log import FaultLog
from torchmoor.fleet.data_plane_view import DataPlaneView, VariantTraffic
from torchmoor.metrics.host import Gpus, GpuUse
from torchmoor.proxy.api.reference import admin_schemas
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.routing import reasons
from torchmoor.tasks import cancel_all
from torchmoor.wire import receipt, session_row

logger = logging.getLogger(__name__)

# The page loads only its own files, and no other page may frame it.
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
    """Takes samples and answers the dashboard's requests while its context lasts."""

    def __init__(
        self,
        registry: Registry,
        data: DataPlaneView,
        *,
        chat_scheme: str | None,
    ) -> None:
        """chat_scheme: http or https, by which the data plane serves the chat page; None if it does not."""
        self._data = data
        self._chat_scheme = chat_scheme
        self._registry = registry
        self.statuses = InstanceStatuses(registry, data.operations)
        self._started_at = time.monotonic()
        self._histories: dict[VariantTraffic, VariantHistory] = {}
        self._loads: dict[str, InstanceHistory] = {}
        self._gpus_here = Gpus()
        self._gpus: dict[str, GpuUse] = {}  # by number and by UUID
        self._find_histories()
        self._sampling: asyncio.Task[None] | None = None
        self._faults = FaultLog(logger)

    async def __aenter__(self) -> Dashboard:
        self._sampling = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._sampling is not None
        await cancel_all([self._sampling])
        await self.statuses.stop()

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        for file in files(__package__).joinpath("static").iterdir():
            kind = KINDS.get(PurePath(file.name).suffix)
            if kind is not None:
                path = "/" if file.name == "index.html" else f"/dashboard/{file.name}"
                router.add_get(path, _answering(file.read_text(encoding="utf-8"), kind))
        router.add_get("/dashboard/receipt.js", _answering(receipt.make_script(), KINDS[".js"]))
        router.add_get("/dashboard/session_row.js", _answering(session_row.make_script(), KINDS[".js"]))
        add_routes(router, self)

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self._data.refresh()
                now = time.monotonic()
                self._find_histories()
                for history in self._histories.values():
                    history.take(now)
                await self._take_loads(now)
            except Exception as error:
                self._faults.add("a sample for the dashboard failed", error, has_trace=True)

    async def _take_loads(self, now: float) -> None:
        gpus = await asyncio.to_thread(self._gpus_here.read)
        self._gpus = {key: gpu for gpu in gpus for key in (gpu.name, gpu.uuid)}
        instances = self._registry.instances()
        self._loads = {each.name: self._loads.get(each.name) or InstanceHistory() for each in instances}
        for instance in instances:
            self._loads[instance.name].take(now, instance, find_gpu(instance, self._gpus))

    def _find_histories(self) -> None:
        """Begin the histories of new endpoints, and drop those of endpoints that are gone."""
        now, traffic = time.monotonic(), self._data.traffic()
        self._histories = {each: self._histories.get(each) or VariantHistory(each, now) for each in traffic}

    @get("/dashboard.json", "dashboard", "Get the dashboard's data.", admin_schemas.DASHBOARD)
    async def _show(self, request: web.Request) -> web.Response:
        range_name = _read_range(request)
        await asyncio.gather(self.statuses.refresh(), self._data.refresh())
        return web.json_response(self.describe(range_name), headers=HEADERS)

    @get(
        "/instances/{name}/history",
        "instanceHistory",
        "An instance's load, sessions, state and GPU over time.",
        admin_schemas.INSTANCE_HISTORY,
    )
    async def _show_load(self, request: web.Request) -> web.Response:
        name, range_name = request.match_info["name"], _read_range(request)
        if (history := self._loads.get(name)) is None:
            raise ApiError(f"There is no history of an instance {name!r}.", status=404)
        return web.json_response({"name": name, "series": history.describe(range_name)}, headers=HEADERS)

    def describe(self, range_name: str) -> dict[str, Any]:
        """Return the content of GET /dashboard.json."""
        return {
            "version": __version__,
            "time": time.time(),
            "uptime_s": round(time.monotonic() - self._started_at, 1),
            "interval_s": INTERVAL_S,
            "chat_port": None if self._chat_scheme is None else self._data.port,
            "chat_scheme": self._chat_scheme,
            "reasons": reasons.SENTENCES,
            "shown_values": [asdict(each) for each in SHOWN_VALUES],
            "has_many_models": any(each.settings.multi_model is not None for each in self._registry.endpoints()),
            "async_endpoints": [each.name for each in self._registry.endpoints() if each.settings.async_inference],
            "autoscaling": describe_scaling(self._registry),
            "variants": [self._describe_variant(history, range_name) for history in self._histories.values()],
            "instances": [
                {
                    **describe_instance(instance, self._registry),
                    "status": self.statuses.find(instance.name),
                    "gpu": None if (gpu := find_gpu(instance, self._gpus)) is None else asdict(gpu),
                }
                for instance in self._registry.instances()
            ],
        }

    def _describe_variant(self, history: VariantHistory, range_name: str) -> dict[str, Any]:
        variant, metrics = history.traffic.variant, history.traffic.metrics
        members = list(variant.pool.members)
        return {
            "endpoint": variant.endpoint,
            "name": variant.name,
            "strategy": variant.settings.routing_strategy,
            "instances": len(members),
            "ready": sum(instance.is_ready for instance in members),
            "desired": None if variant.scale is None else variant.scale.desired,
            **metrics.request_counts(),
            "in_flight": sum(instance.outstanding for instance in members),
            "waiting": history.traffic.num_waiting,
            "waiting_turns": dict(history.traffic.waiting_turns),
            "asynchronous": {
                "processed": metrics.async_processed,
                "failed": metrics.async_failures,
                "expired": metrics.async_expired,
                "cancelled": metrics.async_cancelled,
            },
            **history.describe(range_name),
        }


def _read_range(request: web.Request) -> str:
    range_name = request.query.get("range", NOW)
    if range_name not in RANGES:
        raise ValidationError(f"range must be one of {', '.join(RANGES)}.")
    return range_name


def _answering(text: str, kind: str) -> Any:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type=kind, charset="utf-8", headers=HEADERS)

    return answer
