"""CBOR bodies of AWS's protocol smithy-rpc-v2-cbor: parses requests and writes answers, the reverse of botocore."""

from __future__ import annotations

import struct
from datetime import datetime
from typing import Any

from botocore.parsers import ResponseParserError, RpcV2CBORParser

from torchmoor.errors import RequestInvalid

_PARSER = RpcV2CBORParser()
_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _LIST, _MAP = range(6)
_EPOCH_TAG, _FLOAT64, _FALSE, _TRUE = b"\xc1", b"\xfb", b"\xf4", b"\xf5"
_SIZES = ((24, 1, ">B"), (25, 2, ">H"), (26, 4, ">I"), (27, 8, ">Q"))


def count_items(body: bytes, most: int) -> int:
    """Return the number of items in a body, without parsing it; counting stops above most."""
    at = number = 0
    while at < len(body) and number <= most:
        kind, short = body[at] >> 5, body[at] & 31
        number, at = number + 1, at + 1
        if 24 <= short < 28:
            size = 1 << short - 24
            short, at = int.from_bytes(body[at : at + size], "big"), at + size
        elif short >= 28:  # of indefinite length, or the end of that: the items follow
            continue
        if kind in (_BYTES, _TEXT):
            at += short
    return number


def read(body: bytes) -> Any:
    """Parse a body. Raises RequestInvalid."""
    try:
        return _PARSER.parse_data_item(_PARSER.get_peekable_stream_from_bytes(body))
    except (ResponseParserError, ValueError, OverflowError, OSError, TypeError, RuntimeError, struct.error) as error:
        raise RequestInvalid("The body is not valid CBOR.") from error


def write(value: Any) -> bytes:
    """Render texts, numbers, times, lists and maps."""
    match value:
        case bool():
            return _TRUE if value else _FALSE
        case int():
            return _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)
        case float():
            return _FLOAT64 + struct.pack(">d", value)
        case str():
            encoded = value.encode()
            return _head(_TEXT, len(encoded)) + encoded
        case datetime():
            return _EPOCH_TAG + write(value.timestamp())
        case list():
            return _head(_LIST, len(value)) + b"".join(map(write, value))
        case dict():
            return _head(_MAP, len(value)) + b"".join(write(key) + write(item) for key, item in value.items())
    raise TypeError(f"{type(value).__name__} has no form in CBOR here")


def _head(kind: int, number: int) -> bytes:
    """Render a kind with its value or length."""
    if number < 24:
        return bytes((kind << 5 | number,))
    marker, _, form = next(each for each in _SIZES if number < 1 << 8 * each[1])
    return bytes((kind << 5 | marker,)) + struct.pack(form, number)
