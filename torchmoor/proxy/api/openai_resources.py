"""OpenAI's resources that have ids, such as responses: their requests, and the fields that name their session.

An instance reads these requests itself. The proxy sends each as a POST that has the original method and path in a
header field, because TorchServe has one path.
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes

from torchmoor.proxy.api.body_fields import find_fields
from torchmoor.proxy.http.message import Request
from torchmoor.wire import headers
from torchmoor.wire.response_ids import Place, read_compaction_id, read_id, read_item_id

RESPONSES = b"responses"
CONVERSATIONS = b"conversations"
FILES = b"files"
OPENING = (RESPONSES, CONVERSATIONS, FILES)  # a POST to exactly such a path opens a session
_FIELDS = frozenset(("previous_response_id", "conversation", "store"))
_LINE = f"{headers.RESOURCE}: ".encode()
_REFERENCE = b'"item_reference"'
_ITEM = re.compile(rb'"((?:msg|fc|rs)_[a-z0-9_-]{1,256})"')
_NO_TYPE = rb'"type"[ \t\r\n]*:[ \t\r\n]*null[ \t\r\n]*'
_ONLY_ID = re.compile(rb'"id"[ \t\r\n]*:[ \t\r\n]*%b[ \t\r\n]*(?:,[ \t\r\n]*%b)?}' % (_ITEM.pattern, _NO_TYPE))
_BEFORE_ID = re.compile(rb"{[ \t\r\n]*(?:%b,[ \t\r\n]*)?" % _NO_TYPE)
_MAX_BEFORE_ID = 64  # bytes of a reference before its id
_MAX_TRIED = 16  # the last ids at the end of an object, which may have other members
_COMPACTION = re.compile(rb'"encrypted_content"[ \t\r\n]*:[ \t\r\n]*"(cmp_[a-z0-9-]{1,256})"')
_JSON = json.JSONDecoder()
_FILENAME_LINE = f"{headers.FORM_FILENAME}: ".encode()
_DISPOSITION = re.compile(rb"^content-disposition:[^\r\n]{0,2048}", re.IGNORECASE | re.MULTILINE)
_FILE_FIELD = re.compile(rb';[ \t]*name="?file"?[ \t]*(?:;|$)', re.IGNORECASE)
_FILENAME = re.compile(rb';[ \t]*filename=(?:"([^"\\]*(?:\\.[^"\\]*)*)"|([^";\\ \t]+))', re.IGNORECASE)
_ENCODED_FILENAME = re.compile(rb";[ \t]*filename\*=utf-8''([^; \t]+)", re.IGNORECASE)
MAX_FILENAME_BYTES = 255
_SEARCHED_BYTES = 16_384  # of a form; its file is among its first parts


@dataclass(frozen=True, slots=True)
class Named:
    """The fields of a request that determine its session. place: the response or conversation that it continues.

    is_stored: the answer is to be stored.
    """

    place: Place | None
    is_stored: bool


def read_named(body: bytes) -> Named:
    """Read the fields that name a request's session in the beginning of its body."""
    found = find_fields(body, _FIELDS)
    text = _read_text(found.get("previous_response_id", b"")) or _read_text(found.get("conversation", b""))
    place = read_id(text)
    if place is None and (compaction := _COMPACTION.search(body)) is not None:
        place = read_compaction_id(compaction[1].decode())
    if place is None and (item := _find_last_reference(body)) is not None:
        place = read_item_id(item[1].decode())
    return Named(place, not found.get("store", b"").startswith(b"false"))


def _find_last_reference(body: bytes) -> re.Match[bytes] | None:
    """Find the last item that is named; its instance has most of the conversation in its KV cache.

    An object whose only member is an item's id names it, too.
    """
    item = None
    if (reference := body.rfind(_REFERENCE)) >= 0:
        item = _ITEM.search(body, body.rfind(b"{", 0, reference), body.find(b"}", reference))
    for match in reversed(deque(_ONLY_ID.finditer(body, max(reference, 0)), _MAX_TRIED)):
        start = match.start()
        before = body.rfind(b"{", max(0, start - _MAX_BEFORE_ID), start)
        if before >= 0 and _BEFORE_ID.fullmatch(body, before, start):
            return match
    return item


def resource_lines(request: Request, subpath: bytes) -> bytes:
    """Render the header lines with the original method and path: the instance gets the request as a POST."""
    query = b"?" + request.query if request.query else b""
    length = b"" if request.is_chunked or request.framing_line else b"content-length: 0\r\n"
    return b"%b%b %b%b\r\n%b" % (_LINE, request.method, subpath, query, length)


def filename_line(body: bytes) -> bytes:
    """Render the header line with the name of a form's file, from the beginning of the form; b"" without a name."""
    for line in _DISPOSITION.finditer(body[:_SEARCHED_BYTES]):
        if _FILE_FIELD.search(line[0]) is not None:
            name = _read_filename(line[0])[:MAX_FILENAME_BYTES].decode("utf-8", "ignore")
            return b"%b%b\r\n" % (_FILENAME_LINE, quote(name).encode()) if name else b""
    return b""


def _read_filename(line: bytes) -> bytes:
    """Return the file's name of a part's Content-Disposition, without its path; empty without a name."""
    encoded, plain = _ENCODED_FILENAME.search(line), _FILENAME.search(line)
    if encoded is not None:
        name = unquote_to_bytes(encoded[1])
    elif plain is not None:
        # Clients write a quote as %22, as browsers do, or after a backslash.
        name = re.sub(rb"\\([\"\\])", rb"\1", plain[1] or plain[2] or b"").replace(b"%22", b'"')
    else:
        name = b""
    return re.split(rb"[/\\]", name)[-1]


def _read_text(value: bytes) -> str:
    """Return a text, or the `id` of an object; empty for any other value."""
    try:
        # The end of a value that is not a text may cut a character of the fields behind it.
        content = _JSON.raw_decode(value.decode("utf-8", "replace"))[0]
    except (ValueError, RecursionError):
        return ""
    if isinstance(content, dict):
        content = content.get("id")
    return content if isinstance(content, str) else ""
