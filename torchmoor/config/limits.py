"""Settings of what one client and one caller may use, and of how long an instance may take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from torchmoor.config.group import MIB, Count, Positive, SettingsGroup, Shared, SharedCount, Size

MAX_INLINE_BYTES = 128_000  # the runtime API's limit of an asynchronous request's body


class LimitSettings(SettingsGroup, title="limits"):
    """What one client may use."""

    max_header_bytes: Count = Field(16_384, description="Longest head of a request.")
    max_body_bytes: Count = Field(6 * MIB, description="Longest body of a request to the runtime API.")
    max_passthrough_body_bytes: Count = Field(
        64 * MIB, description="Longest body of a request in a dialect other than the runtime API."
    )
    max_foreign_sessions: Count = Field(
        100_000, description="Sessions remembered whose ids an instance's own handler created; the oldest go first."
    )
    sequence_ttl_s: Count = Field(
        86_400, description="How long the id of a session is valid that TorchServe's sequenceBatching keeps."
    )
    max_session_body_bytes: Count = Field(16_384, description="Longest body that is searched for a session id.")
    max_unrouted_body_bytes: Count = Field(
        8 * MIB,
        description="Body bytes of an OpenAI request buffered while its `model`, the id that it continues or its "
        "affinity key is searched.",
    )
    max_connections: SharedCount = Field(
        10_000, description="Client connections at a time; fewer if the limit of open files does not allow as many."
    )
    reserved_descriptors: Count = Field(
        256, description="Open files that client connections leave to stores, logs and the admin plane."
    )
    max_admin_connections: Count = Field(64, description="Connections to the admin plane at a time.")
    max_replay_body_bytes: Count = Field(
        2 * MIB, description="A body up to this size is kept until its answer begins, so that it can be sent again."
    )
    max_replay_total_bytes: SharedCount = Field(
        64 * MIB, description="The same over all requests in flight; beyond it no further body is kept."
    )
    max_continued_bytes: Size = Field(
        2 * MIB,
        description="Of a streamed answer, its request and the tokens sent are kept up to this size, so that another "
        "instance can continue it; 0: streams are never continued.",
    )
    max_continued_total_bytes: SharedCount = Field(
        64 * MIB, description="The same over all streams; beyond it no further stream can be continued."
    )
    max_waiting_bytes: Annotated[Count, Shared(least="max_body_bytes")] = Field(
        64 * MIB, description="Bodies that wait for an instance or their `model`."
    )
    max_error_body_bytes: Count = Field(
        65_536, description="Bytes read of an instance's error answer to find the cause."
    )
    header_timeout_s: Positive = Field(
        10.0, description="From a request's first byte to the end of its head, on both planes."
    )
    body_timeout_s: Positive = Field(60.0, description="From the end of a request's head to the end of its body.")
    keep_alive_timeout_s: Positive = Field(
        75.0, description="An idle connection of a client or operator is closed after it."
    )


class CallerSettings(SettingsGroup, title="callers"):
    """What one caller may use at a time. Each key and token is a caller; without them, each client address is one."""

    limited: Literal["with-keys", "always", "never"] = Field(
        "with-keys",
        description="When these limits apply: if there are access keys or tokens, always (without them by client "
        "address), or never.",
    )
    max_requests: SharedCount = Field(
        512, description="Requests of one caller that wait for an instance or are being answered; more get 429."
    )
    max_sessions: SharedCount = Field(
        100_000, description="Open sessions of one caller; another opening gets 429, turns of open sessions never do."
    )
    max_async_requests: Count = Field(
        25_000, description="Asynchronous requests of one caller that have not ended, of all endpoints; more get 429."
    )
    max_async_bytes: int = Field(
        256 * MIB, ge=MAX_INLINE_BYTES, description="Inline bodies of one caller's pending asynchronous requests."
    )


class TimeoutSettings(SettingsGroup, title="timeouts"):
    """How long an instance may take."""

    connect_timeout_s: Positive = Field(1.0, description="Connecting to an instance.")
    model_timeout_s: Positive = Field(60.0, description="To an answer's end, or to a stream's first byte.")
    stream_idle_timeout_s: Positive = Field(60.0, description="Between two pieces of a stream.")
    stream_total_timeout_s: Positive = Field(480.0, description="To a stream's end.")
    sweep_interval_s: Positive = Field(0.25, description="How late a passed deadline may be noticed.")
    cancel_timeout_s: Positive = Field(
        5.0,
        description="An operation that cancels requests at an instance, or ends sessions closed elsewhere.",
    )
    pool_idle_timeout_s: Positive = Field(60.0, description="Closes an unused connection to an instance.")
    stop_grace_s: Positive = Field(5.0, description="Running requests may take this long once the proxy stops.")
