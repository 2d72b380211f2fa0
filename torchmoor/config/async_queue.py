"""Settings of the queue of asynchronous requests."""

from __future__ import annotations

from pydantic import Field

from torchmoor.config.group import MIB, Count, Positive, SettingsGroup, Size


class AsyncQueueSettings(SettingsGroup, title="async_queue"):
    """How much the queue of asynchronous requests holds, for how long, and how long an operation may take."""

    max_pending: Count = Field(
        100_000, description="Requests of one endpoint that have not ended; above it requests are refused with 503."
    )
    max_pending_bytes: Count = Field(1024 * MIB, description="Inline bodies of one endpoint's pending requests.")
    max_file_bytes: Count = Field(
        8192 * MIB, description="Used part of SQLite's file. New requests are refused with 503 when it is full."
    )
    min_free_bytes: Size = Field(
        256 * MIB,
        description="Free space that must stay on the file system of SQLite's file; below it new requests are refused "
        "with 503.",
    )
    remember_s: Positive = Field(
        86_400.0, description="How long an ended request is listed and keeps its inference id."
    )
    max_remembered: Count = Field(
        100_000, description="Ended requests that are listed, over all endpoints; above it the oldest are dropped."
    )
    timeout_s: Positive = Field(
        10.0, description="Time-out of one operation: SQLite's wait for a lock, or Redis's answer."
    )
    connect_timeout_s: Positive = Field(2.0, description="Time-out of a connection to Redis.")
    max_connections: Count = Field(16, description="Connections of one process to Redis.")
