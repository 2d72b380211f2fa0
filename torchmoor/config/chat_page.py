"""Settings of the page at /chat."""

from __future__ import annotations

from pydantic import Field

from torchmoor.config.group import Count, SettingsGroup


class ChatPageSettings(SettingsGroup, title="chat_page"):
    """The page at /chat on the data plane, for people with a browser."""

    is_on: bool = Field(True, description="Serve the page; if false, its paths are unknown operations.")
    max_pictures: Count = Field(
        8,
        description="Pictures that the page accepts per session; the handler's session.max_images is the effective "
        "limit.",
    )
