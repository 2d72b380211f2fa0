"""Settings of WebSocket connections to the Responses API."""

from __future__ import annotations

from pydantic import Field

from torchmoor.config.group import MIB, Count, Positive, SettingsGroup, SharedCount


class WebSocketSettings(SettingsGroup, title="websocket"):
    """Clients that ask for responses over a WebSocket connection."""

    max_connections: SharedCount = Field(
        1_000, description="WebSocket connections at a time; they count towards limits.max_connections, too."
    )
    max_message_bytes: Count = Field(16 * MIB, description="Longest message of a client.")
    max_message_values: Count = Field(
        500_000, description="JSON values in a message of a client, estimated before it is parsed."
    )
    max_held_bytes: SharedCount = Field(
        256 * MIB,
        description="Memory over all connections, for messages that arrive or are being answered, and for responses "
        "with `store: false` that can be continued. Above it a message is refused, and a response cannot be continued.",
    )
    ping_interval_s: Positive = Field(20.0, description="Time after which a silent client gets a ping.")
    ping_timeout_s: Positive = Field(
        20.0, description="Time after which a client that does not answer a ping is disconnected."
    )
    idle_timeout_s: Positive = Field(600.0, description="Time after which a connection without a response is closed.")
    max_lifetime_s: Positive = Field(
        3_600.0, description="Time after which a connection is closed, between two responses; clients connect again."
    )
