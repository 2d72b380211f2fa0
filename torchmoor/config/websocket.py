"""Settings of WebSocket connections to the Responses API."""

from __future__ import annotations

from pydantic import Field

from torchmoor.config.group import MIB, Count, Positive, SettingsGroup, SharedCount


class WebSocketSettings(SettingsGroup, title="websocket"):
    """Clients that ask for responses over a WebSocket connection."""

    max_connections: SharedCount = Field(
        1_000, description="WebSocket connections at a time; they count as limits.max_connections, too."
    )
    max_message_bytes: Count = Field(16 * MIB, description="Longest message of a client.")
    max_held_bytes: SharedCount = Field(
        256 * MIB,
        description="Messages being received, and responses with `store: false` that can be continued, of all "
        "connections. Beyond it a message is refused, and a response cannot be continued.",
    )
    ping_interval_s: Positive = Field(20.0, description="A client that has sent nothing for this long gets a ping.")
    ping_timeout_s: Positive = Field(20.0, description="A client that does not answer a ping is disconnected after it.")
    idle_timeout_s: Positive = Field(600.0, description="A connection without a response is closed after it.")
    max_lifetime_s: Positive = Field(
        3_600.0, description="A connection is closed after it, between two responses; clients connect again."
    )
