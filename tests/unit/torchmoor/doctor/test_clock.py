"""This machine's clock, compared with a server's."""

from collections.abc import Iterator

import pytest

from tests.http_servers import QuietHandler, serve_http
from tests.unit.torchmoor.doctor.conftest import MakePlan
from torchmoor.doctor.clock import check_clock, check_fleet_clock
from torchmoor.doctor.finding import Level


class AnotherTime(QuietHandler):
    """A proxy whose clock, or ours, is wrong."""

    def do_GET(self) -> None:
        self.reply(503)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return "Sat, 01 Jan 2000 00:00:00 GMT"


@pytest.fixture
def past_url() -> Iterator[str]:
    with serve_http(AnotherTime) as url:
        yield url


def test_a_wrong_clock_is_a_problem(make_plan: MakePlan, past_url: str) -> None:
    """A clock that differs is a problem, because signatures would be refused; an error answer shows the clock, too."""
    [finding] = check_fleet_clock(make_plan(url=past_url))

    assert finding.level is Level.PROBLEM
    assert "ahead of" in finding.found


@pytest.mark.parametrize(
    ("seconds", "level"), [(20, Level.OK), (-200, Level.WARNING), (299, Level.WARNING), (-301, Level.PROBLEM)]
)
def test_a_clock_is_judged_by_what_signatures_allow(seconds: int, level: Level) -> None:
    """A clock may differ by five minutes either way, as signatures allow."""
    [finding] = check_clock("Thu, 01 Jan 1970 01:00:00 GMT", "S3", now=3600 + seconds)

    assert finding.level is level


def test_no_date_is_no_finding() -> None:
    """A missing or unreadable Date gives no finding."""
    assert [*check_clock(None, "S3"), *check_clock("yesterday", "S3")] == []
