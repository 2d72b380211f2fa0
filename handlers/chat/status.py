"""The worker's status: the numbers that the status operation and the metrics report."""

from handlers.chat.pictures.loader import ImageLoader
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.store import SessionStore
from handlers.counters import Counters
from handlers.engine.engine import Engine

_OUTCOMES = ("finished", "cancelled", "timed_out", "failed", "repeated")


def count_everything(
    counters: Counters, store: SessionStore, recorder: SessionRecorder, loader: ImageLoader, engine: Engine
) -> dict[str, dict[str, int]]:
    """Return the numbers by group and name (docs/instance-protocol.md). Any thread."""
    count = counters.get
    started = count("turns_started")
    ended = {name: count(f"turns_{name}") for name in _OUTCOMES}
    pool, images, scheduler = store.pool, store.images, engine.scheduler
    return {
        "sessions": {
            "open": len(store),
            "max": store.settings.max_sessions,
            "opened": count("sessions_opened"),
            "closed": count("sessions_closed"),
            "adopted": store.sessions_adopted,
            "evicted": store.sessions_evicted,
            "damaged": count("sessions_damaged"),
        },
        "journal": {"bytes": recorder.journal_bytes, "refusals": count("journal_refusals")},
        "memory": {
            "kv_bytes": pool.used_bytes,
            "kv_capacity_bytes": pool.capacity_bytes,
            "kv_evicted": pool.num_evicted,
            "features_bytes": images.features_bytes,
            "features_capacity_bytes": images.max_features_bytes,
            "host_bytes": images.host_bytes,
            "host_capacity_bytes": images.max_host_bytes,
        },
        "turns": {
            **store.turn_counts(),
            "in_progress": started - sum(ended.values()),
            "started": started,
            **ended,
        },
        "tokens": {name: count(f"tokens_{name}") for name in ("prefilled", "reused", "generated")},
        "images": {
            "received": count("images_received"),
            "fetched": loader.num_fetched,
            **{name: count(f"images_{name}") for name in ("encoded", "shared", "demoted")},
        },
        "decoding": loader.decoding.describe(),
        "engine": {
            "steps": engine.num_steps,
            "rows": len(scheduler.running),
            "queued": len(scheduler.waiting),
        },
    }
