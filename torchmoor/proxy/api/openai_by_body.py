"""OpenAI's requests that are routed by their body: `model` names one of several endpoints, an id names an instance.

OpenAI's own client writes `model` after `messages`, so the body is searched for it up to a limit
(limits.max_unrouted_body_bytes).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from torchmoor.errors import ApiError, BodyTooLarge, WrongModel
from torchmoor.proxy.dispatch import unavailable
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.call import WHOLE_BODY, Call, Deadlines, NextStep, Outcome, Waiter
from torchmoor.proxy.http.message import Reply, Request

MAX_VALUE_BYTES = 512  # of a value that is not a text
MAX_TOKENS = 20_000  # brackets and strings before `model`; three times as many as the most messages need

# The text between two tokens. Numbers and short strings in values are skipped by the pattern, not by Python's loop.
# No possessive quantifiers: Python before 3.11.5, such as Debian 12's, matches groups that have them wrongly.
_NESTED_GAP = re.compile(rb'(?:[^"{}\[\]]+|"[^"\\]{0,200}"){0,16}')
_GAP = re.compile(rb'[^"{}\[\]]*')
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_QUOTE, _BACKSLASH = b'"\\'
_OPENING = b"{["


def find_fields(body: bytes, names: frozenset[str]) -> dict[str, bytes]:
    """Find fields in the beginning of a JSON object: the bytes of a text, or the beginning of another value.

    A field whose value is incomplete counts as missing, as one behind MAX_TOKENS does.
    """
    return _search(body, names)[0]


def _search(body: bytes, names: frozenset[str]) -> tuple[dict[str, bytes], bool]:
    """Return the fields, and whether the search ended before MAX_TOKENS."""
    depth = at = 0
    found: dict[str, bytes] = {}
    longest = max(map(len, names)) * 6 + 2  # if each character of a key is an escape
    for _ in range(MAX_TOKENS):
        at = (_NESTED_GAP if depth > 1 else _GAP).match(body, at).end()  # type: ignore[union-attr]  # matches nothing, too
        if at == len(body) or len(found) == len(names):
            return found, True
        if body[at] != _QUOTE:
            depth += 1 if body[at] in _OPENING else -1
            at += 1
            continue
        start, at = at, _end_of_string(body, at)
        if not at:
            return found, True
        if depth != 1 or at - start > longest:
            continue
        colon = _COLON.match(body, at)
        if colon is not None and (name := _read_key(body[start:at])) in names:  # without a colon, it was a value
            value = _read_value(body, colon.end())
            if value:
                found[name] = value
    return found, False


def _read_key(text: bytes) -> str:
    if _BACKSLASH in text:
        return _try_read(text) or ""
    return text[1:-1].decode("utf-8", "replace")


def find_model(body: bytes) -> str | None:
    """Find the value of `model`; None if it is not there.

    Raises WrongModel if it is not a string, or MAX_TOKENS come before it.
    """
    found, is_over = _search(body, frozenset(("model",)))
    value = found.get("model")
    if value is None:
        if not is_over:
            raise WrongModel(f"Give `model` before the first {MAX_TOKENS} brackets and strings of the body.")
        return None
    if value[0] != _QUOTE:
        raise WrongModel("`model` must be a text: the name of an endpoint.")
    model = _try_read(value)
    if model is None:
        raise WrongModel("`model` is not a valid JSON string.")
    return model


def _end_of_string(body: bytes, start: int) -> int:
    """Return the end of the string that begins at a quote; 0 if it does not end in this body."""
    end = body.find(b'"', start + 1)
    if end < 0:
        return 0
    if body[end - 1] != _BACKSLASH:  # true of most strings, images included
        return end + 1
    size = end - start
    while start + size < len(body):  # doubled each time, so linear in the string's length
        size *= 2
        text = body[start + 1 : start + 1 + size]
        end = text.replace(rb"\\", b"__").replace(rb"\"", b"__").find(b'"')  # the first quote that is not escaped
        if end >= 0:
            return start + end + 2
    return 0


def _read_value(body: bytes, start: int) -> bytes:
    """Return a string's bytes, empty if it does not end in this body; of another value, its beginning."""
    if body[start : start + 1] != b'"':
        return body[start : start + MAX_VALUE_BYTES]
    return body[start : _end_of_string(body, start) or start]


def _try_read(text: bytes) -> str | None:
    try:
        return str(json.loads(text))
    except ValueError:
        return None


class OpenAIByBody:
    """A Call that finds its endpoint in the body, and then hands the request to that endpoint's call."""

    def __init__(
        self,
        dispatchers: Dispatchers,
        request: Request,
        *,
        max_body_bytes: int,
        deadlines: Deadlines,
        make: Callable[[bytes, int], Call],
        render_error: Callable[[ApiError], Reply],
    ) -> None:
        """make: makes the call for the body's beginning; gets the limit of its bytes, too. Raises ApiError."""
        check = request.body_check
        self.deadlines = deadlines
        self.max_body_bytes = max_body_bytes
        self._num_read = dispatchers.settings.limits.max_unrouted_body_bytes
        if check is not None:
            self.max_body_bytes = min(max_body_bytes, check.max_body_bytes)
        self._make = make
        self._render_error = render_error
        self._call: Call | None = None
        self._request = request

    num_read_bytes = WHOLE_BODY  # of the endpoint's call, which is not known yet

    @property
    def wait_ends_at(self) -> float:
        assert self._call is not None  # other requests do not wait for it
        return self._call.wait_ends_at

    def route(self, body: bytes, waiter: Waiter) -> NextStep:
        """Find the endpoint, and let its call place the request."""
        try:
            check, self._request.body_check = self._request.body_check, None
            if check is not None:  # verified here once, before the name is used
                check.verify(body)
            call = self._make(body[: self._num_read], self._num_read)
        except ApiError as error:
            return self._render_error(error)
        self._call = call
        return call.route(body, waiter)

    def on_wait_over(self) -> Reply:
        assert self._call is not None
        return self._call.on_wait_over()

    def on_body_too_large(self) -> Reply:
        """Answer as the endpoint's call does; before that is found, with the dialect's error."""
        if self._call is not None:
            return self._call.on_body_too_large()
        return self._render_error(BodyTooLarge(self.max_body_bytes))

    def on_body_dropped(self) -> Reply:
        return self._render_error(unavailable.body_dropped())

    def limit_body(self, waiter: Waiter) -> None:
        """Do nothing: the endpoint is not known yet."""

    def finish(self, outcome: Outcome) -> None:
        if self._call is not None:
            self._call.finish(outcome)
