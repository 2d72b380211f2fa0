"""Settings of the page at /chat."""

from __future__ import annotations

from pydantic import Field

from torchmoor.config.group import SettingsGroup


class ChatPageSettings(SettingsGroup, title="chat_page"):
    """The page at /chat on the data plane, for people with a browser."""

    is_on: bool = Field(True, description="Serve the page; if false, its paths are unknown operations.")
