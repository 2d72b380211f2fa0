"""Settings of how large requests and bodies may be, how many connections there are, and how long clients may take."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from torchmoor.config.group import MIB, Count, Positive, SettingsGroup, Shared, SharedCount, Size, refusal


class LimitSettings(SettingsGroup, title="limits"):
    """Limits of requests, bodies and connections."""

    max_header_bytes: Count = Field(
        16_384,
        description="Longest head (request line and header fields) of a request. Of an answer: four times this.",
    )
    max_body_bytes: Count = Field(6 * MIB, description="Longest body of a request to the runtime API.")
    max_passthrough_body_bytes: Count = Field(
        64 * MIB, description="Longest body of a request in a dialect other than the runtime API."
    )
    max_foreign_sessions: Count = Field(
        100_000,
        description="Sessions with ids of an instance's own handler that the proxy remembers; the oldest are dropped "
        "first.",
    )
    sequence_ttl_s: Count = Field(
        86_400, description="How long a session id for TorchServe's sequence batching is valid."
    )
    max_form_fields: Count = Field(1_000, description="Fields of a form; each takes a worker's time.")
    max_unrouted_body_bytes: Count = Field(
        8 * MIB,
        description="Longest part of an OpenAI body in which the proxy looks for its `model`, its earlier response's "
        "id or its affinity key.",
    )
    max_connections: SharedCount = Field(
        10_000, description="Client connections at a time; fewer if the limit of open files does not allow as many."
    )
    reserved_descriptors: Count = Field(
        256,
        description="Open files that are kept free of client connections and long bodies, for stores, logs and the "
        "admin plane.",
    )
    max_admin_connections: Count = Field(64, description="Connections to the admin plane at a time.")
    max_replay_body_bytes: Count = Field(
        2 * MIB,
        description="Longest body that is kept in memory until its answer begins, so that it can be sent to another "
        "instance; a longer one is kept in a file.",
    )
    max_replay_total_bytes: SharedCount = Field(
        64 * MIB, description="Bytes of all bodies in memory that may be sent again; above it no more are kept."
    )
    max_continued_bytes: Size = Field(
        2 * MIB,
        description="Longest request and record of a stream's pieces that are kept, so that another instance can "
        "continue the stream; 0: streams are never continued.",
    )
    max_continued_total_bytes: SharedCount = Field(
        64 * MIB, description="Bytes kept for all streams; above it no further stream can be continued."
    )
    max_arriving_bytes: Annotated[Count, Shared(least="longest_body_bytes")] = Field(
        256 * MIB,
        description="Bytes of all bodies that are being received, counted as they arrive; above it, the slowest are "
        "dropped. At least max_body_bytes and max_passthrough_body_bytes.",
    )
    max_long_body_bytes_per_s: SharedCount = Field(
        64 * MIB,
        description="Rate at which bodies longer than max_replay_body_bytes are sent to one instance if several wait; "
        "each one is sent without a pause.",
    )
    spool_folder: str = Field(
        "",
        description="Folder of the files in which bodies longer than max_replay_body_bytes are kept; empty: the "
        "system's temporary folder.",
    )
    min_spool_free_bytes: Size = Field(
        256 * MIB,
        description="Free space that must stay on the file system of spool_folder; below it, new bodies stay in "
        "memory.",
    )
    max_waiting_bytes: Annotated[Count, Shared(least="max_body_bytes")] = Field(
        64 * MIB, description="Bytes of all bodies that wait for an instance."
    )
    header_timeout_s: Positive = Field(
        10.0, description="Longest time from a request's first byte to the end of its head, on both planes."
    )
    body_timeout_s: Positive = Field(
        60.0,
        description="Longest time from the end of a request's head to the end of its body; of a WebSocket message, "
        "from its first byte to its last.",
    )
    keep_alive_timeout_s: Positive = Field(
        75.0, description="Time after which an idle connection of a client or operator is closed."
    )

    @property
    def longest_body_bytes(self) -> int:
        return max(self.max_body_bytes, self.max_passthrough_body_bytes)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max_arriving_bytes < self.longest_body_bytes:
            text = f"must be {self.longest_body_bytes} (the longest body) or more, not {self.max_arriving_bytes}"
            raise refusal("max_arriving_bytes", text)
        return self
