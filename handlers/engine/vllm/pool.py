"""The KvPool of vLLM, which manages and evicts its memory for keys and values by itself."""

from collections.abc import Iterable, Sequence

from handlers.engine.contract import KvCache


class VllmCache:
    """Implements `KvCache`. Stores nothing: vLLM finds known prefixes by their content."""

    length = 0
    num_bytes = 0
    is_pinned = False

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.variant = ""

    def match(self, prompt: Sequence[int], variant: str = "") -> int:
        self.variant = variant
        return 0

    def pin(self) -> None: ...

    def unpin(self, *, is_kept: bool = False) -> None: ...

    def drop(self) -> None: ...


class VllmPool:
    """Implements `KvPool`. token_bytes: size of a position's keys and values; used_bytes: vLLM's last report."""

    can_pin = False
    num_evicted = 0

    def __init__(self, num_tokens: int, token_bytes: int) -> None:
        self.capacity_bytes = num_tokens * token_bytes
        self.used_bytes = 0
        self._token_bytes = token_bytes

    def open(self, scope: str) -> VllmCache:
        return VllmCache(scope)

    def num_bytes(self, num_tokens: int) -> int:
        return num_tokens * self._token_bytes

    def num_tokens(self, num_bytes: int) -> int:
        return num_bytes // self._token_bytes

    def check_integrity(self, caches: Iterable[KvCache]) -> None: ...
