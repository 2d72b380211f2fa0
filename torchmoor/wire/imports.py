"""Imports without garbage collection, at the start of a worker and of the proxy."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause garbage collection during imports, then exempt all present objects from it for good.

    transformers makes half a million objects. Collections between them take a sixth of a worker's imports, and each
    full one later, which visits them all, would stop the engine for a quarter of a second. The proxy is smaller.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
