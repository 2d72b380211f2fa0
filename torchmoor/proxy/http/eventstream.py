"""The binary frames of `application/vnd.amazon.eventstream`, as botocore decodes them.

A frame: total length, headers length, CRC32 of those eight bytes, headers, payload, CRC32 of all before; all
numbers are big-endian. A header: name length (1 byte), name, type 7 (string), value length (2 bytes), value.
"""

from __future__ import annotations

import json
from struct import Struct
from zlib import crc32

CONTENT_TYPE = b"application/vnd.amazon.eventstream"

_LENGTHS = Struct(">II")
_WORD = Struct(">I")
_OVERHEAD = 16  # two lengths and two checksums


def encode_headers(headers: dict[str, str]) -> bytes:
    """Encode the header block of a frame."""
    block = bytearray()
    for name, value in headers.items():
        text = value.encode()
        block += b"%c%b\x07%b%b" % (len(name), name.encode(), len(text).to_bytes(2, "big"), text)
    return bytes(block)


def encode_frame(headers: bytes, payload: bytes) -> bytes:
    num_headers = len(headers)
    lengths = _LENGTHS.pack(_OVERHEAD + num_headers + len(payload), num_headers)
    frame = b"%b%b%b%b" % (lengths, _WORD.pack(crc32(lengths)), headers, payload)
    return frame + _WORD.pack(crc32(frame))


_PART = encode_headers(
    {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
)


def payload_part(payload: bytes) -> bytes:
    return encode_frame(_PART, payload)


def exception(kind: str, message: str, error_code: str) -> bytes:
    """Encode an exception frame. botocore drops ErrorCode, so the message must name it too."""
    body = {"Message": message, "ErrorCode": error_code}
    headers = {":message-type": "exception", ":exception-type": kind, ":content-type": "application/json"}
    return encode_frame(encode_headers(headers), json.dumps(body).encode())
