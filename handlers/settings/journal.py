"""Settings of the journal: `handler.journal`."""

from pydantic import Field

from handlers.settings.group import GIB, MIB, Count, HandlerGroup, Number, Positive, Size
from torchmoor.wire.store_urls import JOURNAL_URLS


class JournalSettings(HandlerGroup, title="journal"):
    """The journal from which another worker continues a session."""

    url: str = Field(
        "off",
        repr=False,  # it may contain a password
        description=f"{JOURNAL_URLS}; `off`: a session ends with its worker. Never shown, because it may contain a "
        "password.",
    )
    connect_timeout_s: Positive = Field(2.0, description="Time-out of a connection to Redis or S3.")
    timeout_s: Positive = Field(
        10.0, description="Time-out of one operation, in which an image of intake.max_bytes must be transferred."
    )
    max_in_flight: Count = Field(32, description="Operations at a time, over all of the worker's threads.")
    claim_s: Count = Field(3600, description="How long a journal remembers an opening by its invocation id.")
    max_event_bytes: Count = Field(
        4 * MIB,
        description="Size limit of a question with its answer as JSON.",
    )
    max_image_bytes: Count = Field(
        64 * MIB, description="Size limit of an image that is read; at least intake.max_bytes."
    )
    max_bytes: Count = Field(
        50 * GIB,
        description="Size limit of a directory with all its sessions. When it is full, new sessions are refused.",
    )
    max_sessions: Size = Field(
        1_000_000, description="Open sessions per endpoint; above it new sessions are refused. 0: no limit."
    )
    max_endpoint_bytes: Size = Field(
        100 * GIB, description="Bytes of one endpoint's sessions; above it new sessions are refused. 0: no limit."
    )
    max_caller_bytes: Size = Field(
        25 * GIB, description="Bytes of one caller's sessions; above it new sessions are refused. 0: no limit."
    )
    min_free_bytes: Size = Field(
        256 * MIB,
        description="Free space that must stay on a directory's file system; below it new sessions are refused, and "
        "turns of open ones are served.",
    )
    max_replays: Count = Field(16, description="Answers per session that are kept for retried requests.")
    max_kv_bytes: Size = Field(
        0,
        description="Bytes in the store for KV caches of idle sessions, which another worker reads instead of "
        "computing them again; 0: none are written.",
    )
    max_caller_kv_bytes: Size = Field(
        0, description="The part of max_kv_bytes that one caller's sessions may use; 0: half."
    )
    kv_idle_s: Number = Field(5.0, ge=0, description="How long a session must be idle before its KV cache is written.")
