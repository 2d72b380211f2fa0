"""Eviction: which model leaves the device and the host next. The disk chooses its own victims.

Victims are the least recently used first; a model with a lease stays, and on the device a pinned one, too. The order
is that of the collections: ModelEntries.move appends to on_device and on_host, and the cache moves a used entry to the
end of on_device.
"""

from collections.abc import Iterator

from handlers.many.residency.memory_budget import MemoryBudget
from handlers.many.residency.model_entries import LEAVING, LoaderStep, ModelEntries, ModelEntry, ModelState


def device_victims(entries: ModelEntries) -> Iterator[ModelEntry]:
    """Return the models that may leave the device, the next one first."""
    return (each for each in entries.on_device if not each.num_leases and not entries.is_pinned(each))


def plan_eviction(entries: ModelEntries, budget: MemoryBudget) -> list[tuple[LoaderStep, ModelEntry]]:
    """Choose models to demote or close, so that the device gets room. Empty if none can leave it now.

    The victim goes to the host if others can make room for it there, and is closed otherwise.
    """
    victim = next(device_victims(entries), None)
    if victim is None:
        return []
    if budget.is_unified:
        return [(LoaderStep.CLOSE, victim)]
    num_bytes, host = budget.after_demotion(victim), budget.host
    steps: list[tuple[LoaderStep, ModelEntry]] = []
    leaving = sum(each.host_bytes for each in entries.others if each.state is ModelState.CLOSING)
    for each in entries.on_host:
        if num_bytes > host.max_bytes or host.has_room(num_bytes - leaving):
            break
        steps.append((LoaderStep.CLOSE, each))
        leaving += each.host_bytes
    if not host.has_room(num_bytes - leaving):
        steps.append((LoaderStep.CLOSE, victim))
    elif host.has_room(num_bytes):
        steps.append((LoaderStep.DEMOTE, victim))
    return steps


def leaving_bytes(entries: ModelEntries) -> int:
    """Return the device memory that models give back soon."""
    return sum(each.device_bytes for each in entries if each.state in LEAVING)


def reachable_bytes(entries: ModelEntries, budget: MemoryBudget, entry: ModelEntry) -> int:
    """Return the device memory for an entry after every possible eviction, now or later.

    Entries that wait for room and hold memory stay: two of them would wait for each other.
    """
    staying = (e for e in entries if e is entry or e.state is ModelState.LOADED or entries.is_pinned(e))
    return budget.device.max_bytes - sum(each.device_bytes for each in staying)
