"""A request as the pump passes it to a service, and its caller.

Shared by the chat service and the service of many models; knows nothing of sessions, models or TorchServe.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from handlers.errors import InvalidRequest, NotAcceptable, UnsupportedMedia
from torchmoor.wire import headers as wire

MAX_INVOCATION_ID = 128
# Beginnings of media types that may be accepted. A dialect answers with JSON if it has no other form for the type.
ANSWER_TYPES = (
    "*/*",
    "application/*",
    "application/json",
    "application/octet-stream",
    "application/vnd.sagemaker-triton.",
    "text/*",
    "text/event-stream",
    "text/plain",
)
JSON_TYPES = ("", "application/json", "application/octet-stream", "application/x-www-form-urlencoded")
MAX_ATTRIBUTES = 1024  # characters; SageMaker's own limit


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request with its header names in lower case.

    body: as the worker read it: a long one is a bytearray; empty without one, and for a form. form: a form's fields.
    received_at: in seconds since 1970. fingerprint: the model's, for answers that name it.
    """

    headers: Mapping[str, str]
    body: bytes | bytearray = b""
    form: Mapping[str, bytes] = field(default_factory=dict)
    received_at: float = 0.0
    fingerprint: str | None = None

    @property
    def media_type(self) -> str:
        """The body's media type in lower case, without its parameters; empty if the request names none."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def accepted(self) -> list[str]:
        """The media types of the Accept header in lower case, without their parameters."""
        items = self.headers.get("accept", "").split(",")
        return [kind for item in items if (kind := item.partition(";")[0].strip().lower())]

    def accepts(self, media_type: str) -> bool:
        """Return True if the Accept header names this media type literally."""
        return media_type in self.accepted

    @property
    def custom_attributes(self) -> str:
        """The client's CustomAttributes, which the answer repeats; empty if they do not fit into a header."""
        value = self.headers.get(wire.CUSTOM_ATTRIBUTES, "")
        return value if len(value) <= MAX_ATTRIBUTES and value.isascii() and value.isprintable() else ""

    @property
    def caller(self) -> "Caller":
        headers = self.headers
        return Caller(headers.get(wire.ENDPOINT, ""), headers.get(wire.PRINCIPAL, ""), headers.get(wire.SOURCE, ""))

    @property
    def adapter(self) -> str | None:
        """The adapter that is to answer: empty if the request names the base model, None if it names neither."""
        name = self.headers.get(wire.TARGET_MODEL)
        return "" if name is not None and name == self.caller.endpoint else name

    @property
    def invocation_id(self) -> str:
        """The client's id of the request, the same on a retry; empty if the client sent none."""
        return self.headers.get(wire.INVOCATION_ID, "")[:MAX_INVOCATION_ID]


@dataclass(frozen=True, slots=True)
class Caller:
    """The endpoint and principal that the proxy authenticated; both empty without a proxy.

    source: the address of a caller without a principal, if the proxy limits callers.
    """

    endpoint: str = ""
    principal: str = ""
    source: str = ""

    @property
    def line(self) -> str:
        """The name of the queue for the caller's work; "" for all callers that the proxy does not tell apart."""
        return self.principal or self.source

    @property
    def scope(self) -> str:
        """The name of the scope within which conversations share images and KV blocks."""
        return json.dumps([self.endpoint, self.principal])  # so that no name can pass for a part of another


def check_accept(incoming: Incoming) -> None:
    """Raise NotAcceptable if the Accept header allows no media type that a handler answers with."""
    if incoming.accepted and not any(kind.startswith(ANSWER_TYPES) for kind in incoming.accepted):
        raise NotAcceptable(
            "the answer is JSON or text, which Accept does not allow; send Accept: application/json, or none"
        )


def refuse_other_media(media_type: str) -> None:
    """Raise UnsupportedMedia for a video or a sound."""
    kind = media_type.partition("/")[0]
    if kind in ("video", "audio"):
        raise UnsupportedMedia(f"{kind} is not supported: send images (image/*) and text")


def missing_body(incoming: Incoming) -> InvalidRequest:
    """Return the error for a request without a body. TorchServe leaves none of a form, which is curl's default type."""
    if incoming.media_type == "application/x-www-form-urlencoded":
        return InvalidRequest("the body was read as a form; send JSON with Content-Type: application/json (curl's -H)")
    return InvalidRequest("the request has no body; send JSON with Content-Type: application/json")
