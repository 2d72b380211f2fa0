"""Division of the limits that hold for all proxy processes together."""

from __future__ import annotations

from typing import TypeVar

from torchmoor.config.body_heap import counted_body_bytes
from torchmoor.config.group import SettingsGroup, Shared
from torchmoor.config.settings import ProxySettings
from torchmoor.proxy.instances.instance import Instance

Group = TypeVar("Group", bound=SettingsGroup)


def divide(settings: Group, processes: int) -> Group:
    """Return the settings of one child, with its part of each limit that is marked as Shared in torchmoor/config.

    The kernel spreads connections by a hash, not evenly: one child may refuse a request while another has room. The
    limit of one request's body is not divided.
    """
    changes: dict[str, object] = {}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        shared = next((each for each in field.metadata if isinstance(each, Shared)), None)
        if shared is not None:
            least = getattr(settings, shared.least) if shared.least else 1
            changes[name] = max(least, -(-value // processes))
        elif isinstance(value, SettingsGroup):
            changes[name] = divide(value, processes)
        elif isinstance(value, tuple) and value and isinstance(value[0], SettingsGroup):
            changes[name] = tuple(divide(each, processes) for each in value)
    return settings.replace(**changes) if changes else settings


def part_of_body_bytes(instance: Instance, settings: ProxySettings) -> int:
    """Return how many bytes of an instance's heap the bodies of one child's requests may take.

    The part is never below the longest body of the runtime API that the instance can hold; longer bodies need a larger
    heap.
    """
    total = instance.max_inflight_body_bytes
    return max(total // settings.listen.processes, min(total, counted_body_bytes(settings.limits.max_body_bytes)))
