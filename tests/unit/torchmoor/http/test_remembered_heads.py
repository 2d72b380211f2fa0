"""The memory that a server keeps of its clients' heads."""

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from tests.fuzz.requests import Listener
from torchmoor.proxy.http.reader import RequestCaches, RequestReader

pytestmark = pytest.mark.slow

MAX_GROWTH = 8 << 20


def names(number: int, count: int, length: int) -> list[bytes]:
    """Return field names that are unique to this number."""
    return [b"x%d-%d-" % (number, at) + b"n" * length for at in range(count)]


# By kind: a number of heads that just fits into the caches that it aims at, and the fields of each.
HEADS: dict[str, tuple[int, Callable[[int], bytes]]] = {
    "many options": (1_000, lambda number: b"Connection: " + b",".join(names(number, 300, 5)) + b"\r\n"),
    "few options": (4_000, lambda number: b"Connection: " + b",".join(names(number, 20, 5)) + b"\r\n"),
    "one option": (4_000, lambda number: b"Connection: " + names(number, 1, 220)[0] + b"\r\n"),
    "many fields": (1_000, lambda number: b"".join(name + b": v\r\n" for name in names(number, 60, 5))),
    "long names": (1_000, lambda number: names(number, 1, 15_000)[0] + b": v\r\n"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_odd_heads_take_little_memory(kind: str) -> None:
    """Any number of heads that are never repeated leaves at most eight megabytes."""
    num_heads, make_fields = HEADS[kind]
    caches = RequestCaches()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(num_heads):
            head = b"GET /ping HTTP/1.1\r\nHost: x\r\n" + make_fields(number) + b"\r\n"
            RequestReader(Listener(), caches, 16_384).feed(head)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert after - before <= MAX_GROWTH
