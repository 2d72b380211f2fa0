"""How many bytes of an instance's JVM heap requests' bodies take: by their length, and many times that for a form.

A default of the settings follows from it, so it is here, below all that counts bodies.
"""

from __future__ import annotations

DEFAULT_HEAP_MIB = 512
# Measured with a heap of 512 MiB: 3 bodies of 60 MiB or 28 of 5.9 MiB are served, 4 or 32 end the JVM.
INFLIGHT_BODY_SHARE = 3 / 8
MAX_BODY_EXTRA_BYTES = 5 << 19  # TorchServe collects a body in pieces, which take more than their bytes
# TorchServe makes an object of each field of a form. Measured with a heap of 512 MiB: 3 MB of empty fields, or 61 MB of
# empty parts, end the JVM; 2 MB of fields occupy one of its threads for 5 s.
FORM_WEIGHT, MULTIPART_WEIGHT = 1024, 6


def inflight_body_bytes(heap_mib: int) -> int:
    """Return how many bytes of heap requests' bodies may take at a time."""
    return int((heap_mib << 20) * INFLIGHT_BODY_SHARE)


DEFAULT_INFLIGHT_BODY_BYTES = inflight_body_bytes(DEFAULT_HEAP_MIB)


def counted_body_bytes(num_bytes: int) -> int:
    """Return how many bytes of heap a body of this length takes."""
    return num_bytes + min(num_bytes, MAX_BODY_EXTRA_BYTES)


def longest_body_bytes(heap_bytes: int) -> int:
    """Return the length of the longest body that takes no more than these bytes of heap."""
    return max(heap_bytes // 2, heap_bytes - MAX_BODY_EXTRA_BYTES)


def body_weight(content_type: bytes | None) -> int:
    """Return how many bytes a byte of the body counts as: 1, or more for a form."""
    kind = b"" if content_type is None else content_type.strip().lower()
    if kind.startswith(b"application/x-www-form-urlencoded"):
        return FORM_WEIGHT
    return MULTIPART_WEIGHT if kind.startswith(b"multipart/form-data") else 1  # TorchServe looks at the beginning, too
