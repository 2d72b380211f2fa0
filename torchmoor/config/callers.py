"""Settings of what one caller may use."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torchmoor.config.group import MIB, Count, SettingsGroup, SharedCount
from torchmoor.wire.headers import MAX_INLINE_BYTES


class CallerSettings(SettingsGroup, title="callers"):
    """What one caller may use at a time. Each key and token is a caller; without them, each client address is one."""

    limited: Literal["with-keys", "always", "never"] = Field(
        "with-keys",
        description="When these limits apply: `with-keys`, if there are access keys or tokens; `always`, without them "
        "per client address; `never`.",
    )
    max_requests: SharedCount = Field(
        512, description="Requests of one caller that wait for an instance or are being answered; more get 429."
    )
    max_sessions: SharedCount = Field(
        100_000,
        description="Open sessions of one caller; another opening gets 429, turns of open sessions are always served.",
    )
    max_async_requests: Count = Field(
        25_000, description="Asynchronous requests of one caller that have not ended, of all endpoints; more get 429."
    )
    max_async_bytes: int = Field(
        256 * MIB, ge=MAX_INLINE_BYTES, description="Inline bodies of one caller's pending asynchronous requests."
    )
