"""Affinity keys: the header or body fields by which clients and gateways keep a conversation's calls on one instance.

A key is opaque. Only the hash of the key and its caller leaves this module: no log shows keys, and equal keys of two
callers differ.
"""

from __future__ import annotations

import re
from hashlib import blake2b

from torchmoor.config.routing import AffinitySettings
from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.api.body_fields import find_fields
from torchmoor.proxy.http.message import Request
from torchmoor.wire.json_values import parse_json

# The first one present counts, header fields before the body's.
HEADERS = (
    b"x-session-id",
    b"x-session-affinity",
    b"x-claude-code-session-id",
    b"session-id",
    b"x-dynamo-session-id",
    b"x-smg-routing-key",
    b"x-session-token",
    b"x-aibrix-session-key",
)
FIELDS = ("prompt_cache_key", "safety_identifier", "user")

_KEYS = {field: re.compile(rb'"%b"[ \t\r\n]*:' % field.encode()) for field in FIELDS}


def has_header(request: Request) -> bool:
    """Return whether a header field has a key; the body's fields are then not read."""
    places = request.layout.places
    return any(name in places for name in HEADERS)


def find_affinity(request: Request, body: bytes, settings: AffinitySettings, metrics: InvocationMetrics) -> int | None:
    """Return the 64-bit hash of the caller and its key; None without a key. Counts keys that are too long.

    body: its beginning, as far as it was read.
    """
    if not settings.max_key_bytes:
        return None
    key = _find_key(request, body)
    if len(key) > settings.max_key_bytes:
        metrics.affinity_keys_ignored += 1
        return None
    if not key:
        return None
    principal = request.principal.encode()
    digest = blake2b(b"%d\n%b%b" % (len(principal), principal, key), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _find_key(request: Request, body: bytes) -> bytes:
    """Return the first key that a request has; empty if it has none."""
    for name in HEADERS:
        if value := request.find(name):
            return value
    names = frozenset(field for field, key in _KEYS.items() if key.search(body))
    found = find_fields(body, names) if names else {}
    return next(filter(None, (_read_text(found.get(field, b"")) for field in FIELDS)), b"")


def _read_text(value: bytes) -> bytes:
    """Return a text's bytes; empty for any other value."""
    text = parse_json(value)
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else b""
