"""How much of an instance's heap a request's body takes for its length; see torchmoor.config.body_heap."""

from __future__ import annotations

from torchmoor.config.body_heap import body_weight
from torchmoor.proxy.http.field_names import CONTENT_TYPE
from torchmoor.proxy.http.message import Request

LONG_FORM_BYTES = 1024  # shorter forms are cheap for an instance


def weigh_body(request: Request) -> int:
    """Return how many bytes each byte of a request's body counts as."""
    length = request.content_length
    return body_weight(request.find(CONTENT_TYPE)) if length is None or length > LONG_FORM_BYTES else 1
