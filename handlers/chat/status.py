"""The worker's status: the numbers that the status operation and the metrics report."""

from handlers.chat.pictures.loader import ImageLoader
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.store import SessionStore
from handlers.counters import (
    GRAMMAR_EVENTS,
    IMAGE_EVENTS,
    KV_EVENTS,
    SESSION_EVENTS,
    TOKEN_KINDS,
    TURN_OUTCOMES,
    Counters,
)
from handlers.engine.contract import ChatEngine


def count_everything(
    counters: Counters, store: SessionStore, recorder: SessionRecorder, loader: ImageLoader, engine: ChatEngine
) -> dict[str, dict[str, int]]:
    """Return the numbers by group and name (docs/instance-protocol.md). Any thread."""
    count = counters.get
    started = count("turns_started")
    ended = counters.get_all(TURN_OUTCOMES, "turns_")
    pool, images, numbers = store.pool, store.images, engine.numbers()
    return {
        "sessions": {
            "open": len(store),
            "max": store.settings.max_sessions,
            "is_durable": int(store.is_durable),
            **counters.get_all(SESSION_EVENTS, "sessions_"),
            "adopted": store.sessions_adopted,
            "evicted": store.sessions_evicted,
        },
        "journal": {
            "bytes": recorder.journal_bytes,
            "sessions": recorder.journal_sessions,
            "refusals": count("journal_refusals"),
        },
        "stored_kv": counters.get_all(KV_EVENTS, "stored_kv_"),
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
        "tokens": counters.get_all(TOKEN_KINDS, "tokens_"),
        "images": {**counters.get_all(IMAGE_EVENTS, "images_"), "fetched": loader.num_fetched},
        "grammars": counters.get_all(GRAMMAR_EVENTS, "grammars_"),
        "decoding": loader.decoding.describe(),
        "engine": {
            "steps": numbers.steps,
            "rows": numbers.rows,
            "queued": numbers.queued,
        },
        "pump": {"rounds": count("pump_rounds"), "cpu_ms": count("pump_cpu_us") // 1000},
    }
