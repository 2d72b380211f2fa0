"""The limit of a form's fields, each of which TorchServe passes on as an object of its own."""

from __future__ import annotations

import re

from torchmoor.config.body_heap import FORM_WEIGHT, MULTIPART_WEIGHT, body_weight
from torchmoor.errors import ValidationError

_BOUNDARY = re.compile(rb'(?i:boundary)[ \t]*=[ \t]*"?([^";, \t]+)')
_NESTED = re.compile(rb"(?i:multipart/mixed)")  # a part whose own parts have another boundary


def check_form(content_type: bytes | None, body: bytes, max_fields: int) -> None:
    """Raise ValidationError if the body is a form of more fields."""
    num_fields = _num_fields(content_type, body)
    if num_fields > max_fields:
        raise ValidationError(
            f"The form has {num_fields} fields, more than {max_fields} (limits.max_form_fields). "
            "Send JSON as application/json."
        )


def _num_fields(content_type: bytes | None, body: bytes) -> int:
    """Return how many fields a form has, 0 for another body."""
    weight = body_weight(content_type)
    if weight == FORM_WEIGHT:
        return body.count(b"&") + 1
    if weight != MULTIPART_WEIGHT:
        return 0
    boundary = _BOUNDARY.search(content_type or b"")
    if boundary is None or _NESTED.search(body):
        return body.count(b"\n--") + 1  # lines that may begin a part
    return body.count(b"--" + boundary[1])
