"""Descriptions of sessions for operators. They name a session by its hash and never show its id or its texts."""

from typing import Any

from handlers.chat.images.store import ImageTier
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.store import SessionStore
from torchmoor.wire.session_query import SessionQuery

_TIERS = {ImageTier.FEATURES: "device", ImageTier.HOST: "host", ImageTier.JOURNAL: "journal"}


def list_sessions(store: SessionStore, query: SessionQuery) -> dict[str, Any]:
    """Return a page: `sessions`; `next`, the `after` of the next page, or None; `open`, the number of all sessions.

    `evicted`: number of sessions that have left this worker's memory since its start. They are only in the journal.
    """
    sessions = store.snapshot()
    matching = [each for each in sessions if each.hash > query.after and each.hash.startswith(query.prefix)]
    matching.sort(key=lambda session: session.hash)
    page = matching[: query.limit]
    return {
        "sessions": [describe(store, session) for session in page],
        "next": page[-1].hash if len(matching) > len(page) else None,
        "open": len(sessions),
        "evicted": store.counters.get("sessions_evicted"),
    }


def describe(store: SessionStore, session: Session) -> dict[str, Any]:
    """Describe a session.

    bytes: memory of its KV blocks and images; shared memory counts for each session. tier: `device` if it has KV
    blocks, else the slowest tier of its images.
    """
    num_bytes, tier = store.measure(session)
    kv_bytes = session.cache.num_bytes
    return {
        "session": session.hash,
        "tier": "device" if kv_bytes else _TIERS[tier] if session.num_images else "host",
        "bytes": kv_bytes + num_bytes,
        "turns": len(session.order),
        "images": session.num_images,
        "waiting": len(session.waiting),
        "is_running": session.turn is not None,
        "is_pinned": session.is_pinned,
        "opened_at": session.opened_at,
        "last_used_at": session.used_at,
        "expires_at": store.expires_at(session.id),
    }
