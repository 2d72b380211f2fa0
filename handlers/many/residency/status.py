"""The status of a worker of many models: each model's place, and the budgets."""

from typing import Any

from handlers.many.metrics import MANY_METRICS
from handlers.many.model import ModelTier
from handlers.many.residency.cache import ModelCache
from handlers.many.residency.disk_cache import DiskCache
from handlers.many.residency.model_entries import ModelEntry, ModelState


def describe_memory(cache: ModelCache, now: float) -> dict[str, Any]:
    """Report what is in memory, in bytes and seconds. The caller holds the cache's lock."""
    budget = cache.budget
    models = [_describe(entry, cache.entries.is_pinned(entry), now) for entry in cache.entries]
    for name, broken in cache.history.broken(now).items():
        reason = broken.error.message
        models.append({"name": name, "version": broken.version, "tier": ModelTier.BROKEN.value, "reason": reason})
    return {
        "models": models,
        "loading": [each["name"] for each in models if each["tier"] == ModelTier.LOADING.value],
        "budgets": {
            "device": budget.device.describe(),
            "host": budget.host.describe(),
        },
        "next_to_go": cache.next_to_go(),
        "waiting": cache.entries.num_waiting(),
        "counters": cache.counters.read(MANY_METRICS)["events"],
    }


def add_disk(status: dict[str, Any], in_memory: set[str], disk: DiskCache) -> None:
    """Add the disk's budget, and the models that are on disk only."""
    status["budgets"]["disk"] = disk.budget.describe()
    for name, version, num_bytes in disk.models():
        if name not in in_memory:
            on_disk = {"name": name, "version": version, "tier": ModelTier.DISK.value, "bytes": num_bytes}
            status["models"].append(on_disk)


def _describe(entry: ModelEntry, pinned: bool, now: float) -> dict[str, Any]:
    """Describe a model. bytes: measured; counted_bytes: as the budget counts them."""
    model = entry.model
    return {
        "name": entry.name,
        "version": entry.version,
        "tier": entry.tier.value,
        "bytes": 0 if model is None else model.device_bytes + model.host_bytes,
        "mapped_bytes": 0 if model is None else model.mapped_bytes,
        "counted_bytes": entry.device_bytes + entry.host_bytes,
        "pinned": pinned,
        "retired": entry.is_retired,
        "hits": entry.num_hits,
        "leases": entry.num_leases,
        "last_used_s": round(now - entry.last_used, 3) if entry.last_used else None,
        "progress": None if entry.state is ModelState.READY else str(entry.progress),
    }
