"""Division of the limits that are meant for all proxy processes together."""

from __future__ import annotations

from collections.abc import Callable

from torchmoor.config.launcher import counted_body_bytes
from torchmoor.config.routing import EndpointSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.proxy.instances.instance import Instance


def divide(settings: ProxySettings, processes: int) -> ProxySettings:
    """Return the settings of one child: its part of the bytes, connections, queues and retries.

    The kernel spreads connections by a hash, not evenly: one child may refuse a request while another has room. The
    largest body that one request may have stays allowed.
    """

    def part(total: int, least: int = 1) -> int:
        return max(least, -(-total // processes))

    limits, access, observe = settings.limits, settings.access, settings.observe
    return settings.replace(
        limits=limits.replace(
            max_connections=part(limits.max_connections),
            max_replay_total_bytes=part(limits.max_replay_total_bytes),
            max_waiting_bytes=part(limits.max_waiting_bytes, limits.max_body_bytes),
        ),
        callers=settings.callers.replace(
            max_requests=part(settings.callers.max_requests), max_sessions=part(settings.callers.max_sessions)
        ),
        recovery=settings.recovery.replace(retry_burst=part(settings.recovery.retry_burst)),
        access=access.replace(max_unverified_bytes=part(access.max_unverified_bytes, access.max_signed_body_bytes)),
        observe=observe.replace(
            access_log_buffer_bytes=part(observe.access_log_buffer_bytes),
            max_decisions=part(observe.max_decisions),
            max_decisions_per_s=part(observe.max_decisions_per_s),
        ),
        endpoints=tuple(_divide_endpoint(endpoint, part) for endpoint in settings.endpoints),
    )


def part_of_body_bytes(instance: Instance, settings: ProxySettings) -> int:
    """Return how many bytes of an instance's heap the bodies of one child's requests may take.

    A body of the runtime API stays allowed if the instance can hold it; a longer one needs a larger heap.
    """
    total = instance.max_inflight_body_bytes
    return max(total // settings.listen.processes, min(total, counted_body_bytes(settings.limits.max_body_bytes)))


def _divide_endpoint(endpoint: EndpointSettings, part: Callable[[int], int]) -> EndpointSettings:
    many = endpoint.multi_model
    if many is not None:  # each child counts its own requests for a model
        many = many.replace(hot_outstanding=part(many.hot_outstanding))
    variants = tuple(
        variant
        if variant.scaling is None
        else variant.replace(scaling=variant.scaling.replace(max_held=part(variant.scaling.max_held)))
        for variant in endpoint.variants
    )
    return endpoint.replace(multi_model=many, variants=variants)
