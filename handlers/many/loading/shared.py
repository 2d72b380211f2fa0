"""What several models have in common, made once: templates, tokenizers, image processors.

A part is known by the content of the files that it is made from, so a hundred variants of one model share it however
they came here. It is never changed after it was made. The least recently used go first; a model that uses one keeps it.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class SharedParts:
    """Parts by kind and content. Any thread; a part is made by one thread while others that need it wait."""

    def __init__(self, max_parts: int) -> None:
        self._max_parts = max_parts
        self._parts: OrderedDict[tuple[str, ...], object] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()  # transformers changes settings of the whole process while it makes a model

    def __len__(self) -> int:
        return len(self._parts)

    def get(self, key: tuple[str, ...], make: Callable[[], T]) -> T:
        """The part of this key; `make` is called if there is none."""
        found = self._find(key)
        if found is not None:
            return found  # type: ignore[return-value]
        with self._making:
            found = self._find(key)
            if found is not None:
                return found  # type: ignore[return-value]
            made = make()
            with self._lock:
                self._parts[key] = made
                while len(self._parts) > self._max_parts:
                    self._parts.popitem(last=False)
        return made

    def alone(self, make: Callable[[], T]) -> T:
        """Make something that is not shared, while nothing else is made."""
        with self._making:
            return make()

    def _find(self, key: tuple[str, ...]) -> object | None:
        with self._lock:
            if key not in self._parts:
                return None
            self._parts.move_to_end(key)
            return self._parts[key]


def digest(files: Iterable[Path]) -> str:
    """One hash of several files' names and contents; those that are missing count as missing."""
    found = hashlib.blake2b(digest_size=16)
    for file in files:
        content = file.read_bytes() if file.is_file() else None
        found.update(f"{file.name} {-1 if content is None else len(content)}\n".encode())
        found.update(content or b"")
    return found.hexdigest()
