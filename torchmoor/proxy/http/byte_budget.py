"""A limit of bytes that many requests or connections keep together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class ByteBudget:
    """Counts the bytes that are kept, and refuses bytes above the limit."""

    max_total_bytes: int
    used_bytes: int = 0

    def try_take(self, num_bytes: int) -> bool:
        """Count bytes as kept, or refuse."""
        if self.used_bytes + num_bytes > self.max_total_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Count bytes as no longer kept."""
        self.used_bytes -= num_bytes
