"""Assembles asynchronous inference from the proxy's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchmoor.async_inference.notifications.notifier import Notifier
from torchmoor.async_inference.objects.scheme_store import SchemeStore
from torchmoor.async_inference.queues.queue_url import open_queue
from torchmoor.async_inference.service import AsyncEndpointContext, AsyncInference, AsyncParts
from torchmoor.config.settings import ProxySettings
from torchmoor.fleet.data_plane_view import VariantTraffic
from torchmoor.metrics.backlog import AsyncMetrics
from torchmoor.proxy.dispatch.async_capacity import EndpointCapacity
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.proxy.instances.registry import Registry


def make_async_inference(
    settings: ProxySettings,
    registry: Registry,
    counted: Callable[[], Iterable[VariantTraffic]],
    dispatchers: Dispatchers | None,
) -> AsyncInference | None:
    """Assemble asynchronous inference; returns None if no endpoint accepts it now or later.

    counted: returns the counters of all variants. dispatchers: None in a process that runs no requests.
    Raises ConfigError if an endpoint has no location for its results.
    """
    is_asked = any(endpoint.settings.async_inference is not None for endpoint in registry.endpoints())
    if not (is_asked or settings.control.is_on):
        return None
    objects = settings.objects
    of_results = objects.replace(
        input_directories=objects.output_directories, input_prefixes=(), max_input_bytes=objects.max_output_bytes
    )
    parts = AsyncParts(
        queue=lambda: open_queue(settings.async_inference.queue, settings.async_queue),
        store=lambda: SchemeStore(objects),
        results=lambda: SchemeStore(of_results),
        notifier=lambda: Notifier(settings.notices),
    )
    service = AsyncInference(settings.async_inference, parts, connect_timeout_s=settings.timeouts.connect_timeout_s)

    def add(endpoint: Endpoint) -> None:
        if endpoint.settings.async_inference is None:
            return
        variants = {each.variant.name: each.metrics for each in counted() if each.variant.endpoint == endpoint.name}
        metrics = AsyncMetrics(endpoint.name, variants, lambda: sum(each.is_ready for each in endpoint.instances))
        capacity = None if dispatchers is None else EndpointCapacity(dispatchers, endpoint)
        root = settings.async_inference.output_root
        service.add(AsyncEndpointContext(endpoint.settings.async_inference, metrics, capacity, root=root))

    def retire(endpoint: Endpoint) -> None:
        context = service.endpoints.get(endpoint.name)
        service.remove(endpoint.name, settings.control.drain_timeout_s)
        if context is not None and isinstance(context.capacity, EndpointCapacity):
            context.capacity.close()

    registry.watch(add, on_retired=retire)
    return service
