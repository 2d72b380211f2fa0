"""Parts that several models share: templates, tokenizers, image processors.

A part is identified by the content of its files, so all variants of one model share it. It is immutable. The least
recently used part is dropped first; models that use it keep it.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from handlers.models.skeleton import making_lock
from torchmoor.wire.last_kept import LastKept

T = TypeVar("T")
MAX_PARTS = 64


class SharedParts:
    """Parts by kind and content. Any thread; one thread makes a part while others wait for it."""

    def __init__(self) -> None:
        self._parts: LastKept[tuple[str, ...], object] = LastKept(MAX_PARTS)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, key: tuple[str, ...], make: Callable[[], T]) -> T:
        """Return the part of this key, made by `make` if it is missing."""
        found = self._find(key)
        if found is not None:
            return found  # type: ignore[return-value]
        with making_lock:
            found = self._find(key)
            if found is not None:
                return found  # type: ignore[return-value]
            made = make()
            with self._lock:
                self._parts.keep(key, made)
        return made

    def _find(self, key: tuple[str, ...]) -> object | None:
        with self._lock:
            if key not in self._parts:
                return None
            self._parts.move_to_end(key)
            return self._parts[key]


def digest(files: Iterable[Path]) -> str:
    """Hash the names and contents of several files, which may be missing."""
    found = hashlib.blake2b(digest_size=16)
    for file in files:
        content = file.read_bytes() if file.is_file() else None
        found.update(f"{file.name} {-1 if content is None else len(content)}\n".encode())
        found.update(content or b"")
    return found.hexdigest()
