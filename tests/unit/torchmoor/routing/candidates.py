"""Make instances in the form that routing uses."""

from dataclasses import dataclass, field

from torchmoor.proxy.routing.pool import Pool
from torchmoor.proxy.routing.reported_status import ReportedStatus


@dataclass(eq=False)
class FakeCandidate:
    name: str
    outstanding: int = 0
    capacity: int = 4
    session_room: int | None = None
    is_ready: bool = True
    share: float = 1.0
    reported: ReportedStatus = field(default_factory=ReportedStatus)

    @property
    def load(self) -> int:
        return int(self.outstanding / self.share)


def pool_of(*candidates: FakeCandidate) -> Pool[FakeCandidate]:
    return Pool(candidates)


def named(number: int) -> list[FakeCandidate]:
    """Return this number of idle instances."""
    return [FakeCandidate(f"i{index}") for index in range(number)]


def change(pool: Pool[FakeCandidate], candidate: FakeCandidate, **values: object) -> None:
    """Change an instance and tell its pool, as leases and the registry do."""
    for name, value in values.items():
        setattr(candidate, name, value)
    pool.update(candidate)
