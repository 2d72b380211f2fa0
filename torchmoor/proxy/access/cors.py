"""CORS: answers that a browser lets pages of listen.allowed_origins read, and answers to its preflight requests."""

from __future__ import annotations

from collections.abc import Sequence

from torchmoor.proxy.access.web_pages import ORIGIN
from torchmoor.proxy.http.fields import PASSED, FieldNote
from torchmoor.proxy.http.message import Reply, Request

REQUESTED_METHOD = b"access-control-request-method"
REQUESTED_FIELDS = b"access-control-request-headers"
METHODS = b"DELETE, GET, HEAD, PATCH, POST, PUT"
MAX_AGE_S = 7200  # the longest that Chromium keeps a preflight's answer

_VARY = b"vary: origin\r\n"
# No request has cookies, so "*" stands for every field.
_LINES = b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\n" + _VARY


_OWN_FIELDS = b"access-control-"
_HELD_BACK = FieldNote(is_passed=False)


def note_answer(name: bytes) -> FieldNote:
    """Hold back an instance's own CORS fields: a browser refuses an answer that has them twice."""
    return _HELD_BACK if name.startswith(_OWN_FIELDS) else PASSED


class Cors:
    """Knows the origins whose pages may read answers; without any, it adds nothing to answers.

    lines_for_others: of an answer to a request without an Origin, or of another one.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._lines = {origin.encode(): _LINES % origin.encode() for origin in origins}
        self.lines_for_others = _VARY if origins else b""

    def answer_lines(self, request: Request) -> bytes:
        """Return the header lines that each answer to this request gets."""
        return self._lines.get(request.find(ORIGIN) or b"", self.lines_for_others)

    def is_preflight(self, request: Request) -> bool:
        """Return whether a browser asks what a page of an allowed origin may send; it does so without credentials."""
        return (
            request.method == b"OPTIONS"
            and request.find(ORIGIN) in self._lines
            and request.find(REQUESTED_METHOD) is not None
        )

    def answer_preflight(self, request: Request) -> Reply:
        """Allow every method, and the fields that the page wants to send."""
        fields = request.find(REQUESTED_FIELDS)
        allowed_fields = () if fields is None else ((b"access-control-allow-headers", fields),)
        return Reply(
            200,
            (
                (b"access-control-allow-methods", METHODS),
                *allowed_fields,
                (b"access-control-max-age", b"%d" % MAX_AGE_S),
            ),
        )
