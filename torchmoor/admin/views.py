"""Views of instances, scaling and discovery as JSON, for the API and the dashboard."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry


@dataclass(frozen=True, slots=True)
class ShownValue:
    """A value of an instance that the dashboard shows and, if it has a column, `torchmoor instances`.

    used, most: paths in an instance's object of GET /dashboard.json, where `status` is what its worker reports.
    most: "" if the value has no limit. unit: "count", "bytes" or "text".
    """

    label: str
    used: str
    most: str = ""
    unit: str = "count"
    column: str = ""


SHOWN_VALUES = (
    ShownValue("Requests", "outstanding", "capacity", column="LOAD"),
    ShownValue("Sessions", "status.sessions.open", "status.sessions.max", column="SESSIONS"),
    ShownValue(
        "KV cache (device)", "status.memory.kv_bytes", "status.memory.kv_capacity_bytes", unit="bytes", column="KV"
    ),
    ShownValue(
        "Features (device)",
        "status.memory.features_bytes",
        "status.memory.features_capacity_bytes",
        unit="bytes",
        column="FEATURES",
    ),
    ShownValue(
        "Images (host)", "status.memory.host_bytes", "status.memory.host_capacity_bytes", unit="bytes", column="HOST"
    ),
    ShownValue("Room for new sessions", "session_room"),
    ShownValue("Turns running", "status.turns.running"),
    ShownValue("Turns waiting", "status.turns.waiting"),
    ShownValue("Turns done", "status.turns.finished"),
    ShownValue("Prompt tokens computed", "status.tokens.prefilled"),
    ShownValue("Prompt tokens reused", "status.tokens.reused"),
    ShownValue("Tokens generated", "status.tokens.generated"),
    ShownValue("Device", "status.device", unit="text"),
)


def describe_instance(instance: Instance, registry: Registry) -> dict[str, Any]:
    """Describe an instance: its addresses, state and load."""
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
        "last_end": None if instance.last_end is None else asdict(instance.last_end),
        "idle_connections": len(instance.idle),
        "source": instance.source or "static",
    }


def describe_scaling(registry: Registry) -> list[dict[str, Any]]:
    """Describe each autoscaled variant: its limits, its desired and its running instances."""
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
            "is_limited": variant.scale is not None and variant.scale.is_limited,
            "last_start_s": _rounded(variant.last_start_s),
        }
        for endpoint in registry.endpoints()
        for variant in endpoint.variants
        if (scaling := variant.settings.scaling) is not None
    ]


def describe_discovery(registry: Registry) -> list[dict[str, Any]]:
    """Describe each DNS name that instances come from, and its last answer."""
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


def _starting_s(instance: Instance) -> float | None:
    """Return how long the instance has been starting; None if it is not starting, or not started by this proxy."""
    if instance.state is not InstanceState.STARTING or instance.started_at is None:
        return None
    return _rounded(time.monotonic() - instance.started_at)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
