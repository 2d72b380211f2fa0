"""State of a DNS name that lists instances: its last answer and its failures."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic


@dataclass(eq=False)
class DnsSource:
    """The state of one entry of Discovery.

    answered_at: of the last answer, in monotonic seconds; None before the first. error: why the last query failed;
    empty after an answer. notes: the parts of the last answer that could not be used.
    """

    dns_name: str
    endpoint: str
    variant: str
    answered_at: float | None = None
    num_listed: int = 0
    num_failures: int = 0
    error: str = ""
    notes: tuple[str, ...] = ()

    def age_s(self) -> float | None:
        """Return the seconds since the last answer."""
        return None if self.answered_at is None else monotonic() - self.answered_at
