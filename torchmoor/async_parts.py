"""Asynchronous inference put together from the proxy's settings."""

from __future__ import annotations

from dataclasses import replace

from torchmoor.api.async_slots import EndpointSlots
from torchmoor.api.gateway import Gateway
from torchmoor.async_inference.notices import Notifier
from torchmoor.async_inference.queue_url import open_queue
from torchmoor.async_inference.scheme_store import open_object_store
from torchmoor.async_inference.service import AsyncEndpoint, AsyncInference, AsyncParts
from torchmoor.settings import ProxySettings


def make_async_inference(settings: ProxySettings, gateway: Gateway) -> AsyncInference | None:
    """None if no endpoint has it. Raises ConfigError if results have nowhere to go."""
    root = settings.async_inference.output_root
    endpoints = [
        AsyncEndpoint(
            endpoint.name,
            endpoint.settings.async_inference,
            [variant.name for variant in endpoint.variants],
            EndpointSlots(gateway, endpoint),
            root,
        )
        for endpoint in gateway.registry.endpoints()
        if endpoint.settings.async_inference is not None
    ]
    if not endpoints:
        return None
    objects = settings.objects
    parts = AsyncParts(
        queue=lambda: open_queue(settings.async_inference.queue, settings.async_queue),
        store=lambda: open_object_store(objects),
        results=lambda: open_object_store(
            replace(objects, input_directories=objects.output_directories, input_prefixes=())
        ),
        notifier=lambda: Notifier(settings.notices),
    )
    return AsyncInference(
        settings.async_inference, endpoints, parts, connect_timeout_s=settings.timeouts.connect_timeout_s
    )
