"""The metrics of a chat worker: their table, and the numbers, which the status operation reports too."""

from dataclasses import asdict

from handlers.chat.images.decoding_budget import DecodingBudget
from handlers.chat.images.loader import ImageLoader
from handlers.chat.sessions.known_sessions import KnownSessions
from handlers.chat.sessions.store import SessionStore
from handlers.engine.contract import ChatEngine
from handlers.worker.counters import COUNTER, GAUGE, HISTOGRAM, Counters, Metric

COMMON_METRICS = (  # of workers of many models, too
    Metric(
        "decoding_bytes",
        GAUGE,
        "B",
        "Memory that images take while they are decoded; workers of many models have it, too.",
        ("decoding", "bytes"),
    ),
    Metric("decoding_capacity_bytes", GAUGE, "B", "Its limit.", ("decoding", "capacity_bytes")),
)

CHAT_METRICS = (
    Metric("sessions_open", GAUGE, "count", "Sessions that are open.", ("sessions", "open")),
    Metric("sessions_max", GAUGE, "count", "Sessions that may be open at once.", ("sessions", "max")),
    Metric("sessions_chars", GAUGE, "count", "Characters of all texts of open sessions.", ("sessions", "chars")),
    Metric(
        "sessions_total",
        COUNTER,
        "count",
        "Changes of sessions. An evicted session left this worker's memory; an adopted one was read from its journal; "
        "a damaged one was lost because its journal is not as a worker writes it.",
        ("sessions",),
        ("Event", ("opened", "closed", "adopted", "evicted", "damaged")),
    ),
    Metric("journal_bytes", GAUGE, "B", "The journals of all sessions, as last measured.", ("journal", "bytes")),
    Metric(
        "journal_sessions",
        GAUGE,
        "count",
        "The journal's open sessions of all workers, as last measured.",
        ("journal", "sessions"),
    ),
    Metric(
        "journal_refusals_total",
        COUNTER,
        "count",
        "Openings that were refused because the journal, or the caller's share of it, is full.",
        ("journal", "refusals"),
    ),
    Metric(
        "journal_failures_total",
        COUNTER,
        "count",
        "Operations that the journal's store did not do; their requests got JournalUnavailable.",
        ("journal", "failures"),
    ),
    Metric(
        "stored_kv_total",
        COUNTER,
        "count",
        "Parts of KV caches in the journal ([journals.md](journals.md#kv-caches)). Stale: of another model or "
        "conversation. Damaged: not as a worker of this fleet writes it. Refused: `journal.max_kv_bytes` are used. "
        "Limited: the caller's `journal.max_caller_kv_bytes` are used.",
        ("stored_kv",),
        ("Event", ("written", "read", "stale", "damaged", "refused", "limited", "failed")),
    ),
    Metric("kv_bytes", GAUGE, "B", "Bytes of KV blocks in use on the device.", ("memory", "kv_bytes")),
    Metric("kv_capacity_bytes", GAUGE, "B", "Bytes of all KV blocks.", ("memory", "kv_capacity_bytes")),
    Metric(
        "kv_evictions_total",
        COUNTER,
        "count",
        "Conversations that lost their KV blocks to others.",
        ("memory", "kv_evicted"),
    ),
    Metric("features_bytes", GAUGE, "B", "Bytes of image features on the device.", ("memory", "features_bytes")),
    Metric("features_capacity_bytes", GAUGE, "B", "Their limit.", ("memory", "features_capacity_bytes")),
    Metric("host_bytes", GAUGE, "B", "Bytes of encoded images in the host's memory.", ("memory", "host_bytes")),
    Metric("host_capacity_bytes", GAUGE, "B", "Their limit.", ("memory", "host_capacity_bytes")),
    *COMMON_METRICS,
    Metric("turns_running", GAUGE, "count", "Turns in preparation or generation.", ("turns", "running")),
    Metric(
        "turns_waiting", GAUGE, "count", "Turns that wait for an earlier turn of their session.", ("turns", "waiting")
    ),
    Metric(
        "turns_total",
        COUNTER,
        "count",
        "Turns that ended. A repeated turn got its recorded answer.",
        ("turns",),
        ("Outcome", ("finished", "cancelled", "timed_out", "failed", "repeated")),
    ),
    Metric(
        "tokens_total",
        COUNTER,
        "count",
        "Prompt tokens that were computed; prompt tokens found in the KV cache; those of them that were read from the "
        "journal; tokens of answers.",
        ("tokens",),
        ("Kind", ("prefilled", "reused", "restored", "generated")),
    ),
    Metric(
        "images_total",
        COUNTER,
        "count",
        "Images that arrived in requests, were downloaded, were encoded by the vision tower, were already encoded, or "
        "lost their features to others.",
        ("images",),
        ("Event", ("received", "fetched", "encoded", "shared", "demoted")),
    ),
    Metric(
        "grammars_total",
        COUNTER,
        "count",
        "Grammars of answers ([structured-output.md](structured-output.md#what-is-refused)). Reused: an answer found "
        "its grammar in the cache. Exceeded: `grammar.max_compile_cpu_s` or `grammar.max_compile_bytes`.",
        ("grammars",),
        ("Event", ("compiled", "reused", "refused", "exceeded")),
    ),
    Metric("engine_steps_total", COUNTER, "count", "Engine steps; each step runs the model once.", ("engine", "steps")),
    Metric("batch_rows", GAUGE, "count", "Sequences in the engine's batch.", ("engine", "rows")),
    Metric("queued_sequences", GAUGE, "count", "Sequences that wait for the batch.", ("engine", "queued")),
    Metric(
        "pump_rounds_total",
        COUNTER,
        "count",
        "Exchanges of rows between TorchServe and the worker.",
        ("pump", "rounds"),
    ),
    Metric(
        "pump_cpu_milliseconds_total",
        COUNTER,
        "ms",
        "Processor time of the thread that does these exchanges; text and bytes of streamed tokens included.",
        ("pump", "cpu_ms"),
    ),
    Metric("queue_seconds", HISTOGRAM, "s", "Time from a question's arrival to the start of its turn.", ("queue",)),
    Metric(
        "time_to_first_token_seconds", HISTOGRAM, "s", "Time from a question's arrival to its first token.", ("ttft",)
    ),
    Metric("inter_token_seconds", HISTOGRAM, "s", "Mean time between an answer's tokens.", ("inter_token",)),
)


def count_everything(
    counters: Counters, store: SessionStore, known: KnownSessions, loader: ImageLoader, engine: ChatEngine
) -> dict[str, dict[str, int]]:
    """Return the numbers by group and name (docs/instance-protocol.md). Any thread."""
    counts = counters.read(CHAT_METRICS)
    started, waiting = counters.get("turns_started"), store.count_waiting()
    in_progress = max(started - sum(counts["turns"].values()), 0)  # a turn may end just before its start is counted
    pool, images = store.pool, store.images
    return {
        **counts,
        **count_common(loader.decoding),
        "sessions": counts["sessions"]
        | {
            "open": len(store),
            "max": store.settings.max_sessions,
            "is_durable": int(store.is_durable),
            "chars": store.num_chars,
        },
        "journal": counts["journal"] | {"bytes": known.used_bytes, "sessions": known.num_sessions},
        "memory": {
            "kv_bytes": pool.used_bytes,
            "kv_capacity_bytes": pool.capacity_bytes,
            "kv_evicted": pool.num_evicted,
            "features_bytes": images.features_bytes,
            "features_capacity_bytes": images.max_features_bytes,
            "host_bytes": images.host_bytes,
            "host_capacity_bytes": images.max_host_bytes,
        },
        "turns": counts["turns"]
        | {
            "running": max(in_progress - waiting, 0),
            "waiting": waiting,
            "in_progress": in_progress,
            "started": started,
        },
        "engine": asdict(engine.numbers()),
        "pump": counts["pump"] | {"cpu_ms": counters.get("pump_cpu_us") // 1000},
    }


def count_common(decoding: DecodingBudget) -> dict[str, dict[str, int]]:
    """Return the numbers of COMMON_METRICS by group and name."""
    return {"decoding": decoding.describe()}
