"""State of a DNS name that lists instances: its last answer and its failures."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic


@dataclass(eq=False, repr=False)
class DnsSource:
    """What is known of one entry of Discovery.

    answered_at: of the last answer, in monotonic seconds; None before the first. error: why there was none to the last
    query; empty after an answer. notes: what of the last answer could not be used.
    """

    dns_name: str
    endpoint: str
    variant: str
    answered_at: float | None = None
    num_listed: int = 0
    num_failures: int = 0
    error: str = ""
    notes: tuple[str, ...] = ()

    def age_s(self, now: float | None = None) -> float | None:
        """Since the last answer."""
        return None if self.answered_at is None else (monotonic() if now is None else now) - self.answered_at

    def __repr__(self) -> str:
        return f"<DnsSource {self.dns_name} {self.num_listed} listed, {self.num_failures} failures>"
