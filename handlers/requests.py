"""A request as the adapter passes it to a service, and its caller.

Shared by the chat service and the service of many models; knows nothing of sessions, models or TorchServe.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handlers.errors import UnsupportedMedia
from torchmoor.wire import headers as wire

MAX_INVOCATION_ID = 128


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request with its header names in lower case and its body as TorchServe parsed it."""

    headers: Mapping[str, str]
    body: bytes | str | dict[str, Any] | list[Any] | None

    def accepts(self, media_type: str) -> bool:
        """Return True if the Accept header names this media type literally."""
        accepted = self.headers.get("accept", "").split(",")
        return media_type in [item.partition(";")[0].strip().lower() for item in accepted]

    @property
    def caller(self) -> "Caller":
        headers = self.headers
        return Caller(headers.get(wire.ENDPOINT, ""), headers.get(wire.PRINCIPAL, ""))

    @property
    def invocation_id(self) -> str:
        """The client's id of the request, the same on a retry; empty if the client sent none."""
        return self.headers.get(wire.INVOCATION_ID, "")[:MAX_INVOCATION_ID]


@dataclass(frozen=True, slots=True)
class Caller:
    """The endpoint and principal that the proxy authenticated; both empty without a proxy."""

    endpoint: str = ""
    principal: str = ""

    @property
    def scope(self) -> str:
        """Name the scope within which conversations share images and KV blocks."""
        return json.dumps([self.endpoint, self.principal])  # so that no name can pass for a part of another


def refuse_other_media(content_type: str) -> None:
    """Raise UnsupportedMedia for the media type of a video or a sound."""
    kind = content_type.strip().partition("/")[0].lower()
    if kind in ("video", "audio"):
        raise UnsupportedMedia(f"{kind} is not supported: send images (image/*) and text")
