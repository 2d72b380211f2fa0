"""Schemes of images' addresses, and which of them need a download.

Dialects, the fetch pool and the loader all use this list, so a new scheme is added here first.
"""

import re
from typing import TypeGuard

HTTP = frozenset(("http", "https"))
S3 = "s3"
DATA = "data"
# In messages:
SCHEMES = "http, https, s3 or data"
ADDRESS_FORM = "an http(s) or s3 address or a data URL"

_FETCHED = tuple(f"{scheme}:" for scheme in (*sorted(HTTP), S3))
_BEGINNINGS = (*(f"{scheme}//" for scheme in _FETCHED), f"{DATA}:")
_LONGEST = max(map(len, _BEGINNINGS))
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def find_scheme(reference: str) -> str:
    """Return the scheme of an address in lower case; "" for base64 text."""
    found = _SCHEME.match(reference)
    return "" if found is None else found[1].lower()


def is_address(text: str) -> bool:
    """Return whether a text begins like an address of an image."""
    return text[:_LONGEST].lower().startswith(_BEGINNINGS)


def is_fetched(reference: object) -> TypeGuard[str]:
    """Return whether an image must be downloaded."""
    return isinstance(reference, str) and reference.lstrip()[:_LONGEST].lower().startswith(_FETCHED)
