"""What one of several processes gets of limits that are meant for all of them together."""

from __future__ import annotations

from torchmoor.config.routing import EndpointSettings
from torchmoor.config.settings import ProxySettings


def share_of(settings: ProxySettings, processes: int) -> ProxySettings:
    """The settings of one of so many processes: its part of the bytes, connections, queues and retries.

    The kernel spreads connections over the processes by a hash, not evenly: one process may refuse while another has
    room. Bodies that one request may have are no part of this.
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
        recovery=settings.recovery.replace(retry_burst=part(settings.recovery.retry_burst)),
        access=access.replace(max_unverified_bytes=part(access.max_unverified_bytes, access.max_signed_body_bytes)),
        observe=observe.replace(
            access_log_buffer_bytes=part(observe.access_log_buffer_bytes),
            max_decisions=part(observe.max_decisions),
            max_decisions_per_s=part(observe.max_decisions_per_s),
        ),
        endpoints=tuple(_share_of_endpoint(endpoint, processes) for endpoint in settings.endpoints),
    )


def _share_of_endpoint(endpoint: EndpointSettings, processes: int) -> EndpointSettings:
    late, many = endpoint.late_binding, endpoint.multi_model
    if late is not None:
        late = late.replace(max_waiting=max(1, -(-late.max_waiting // processes)))
    if many is not None:  # each process counts its own requests for a model
        many = many.replace(hot_outstanding=max(1, -(-many.hot_outstanding // processes)))
    variants = tuple(
        variant
        if variant.scaling is None
        else variant.replace(
            scaling=variant.scaling.replace(max_held=max(1, -(-variant.scaling.max_held // processes)))
        )
        for variant in endpoint.variants
    )
    return endpoint.replace(late_binding=late, multi_model=many, variants=variants)
