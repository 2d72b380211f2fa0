"""This machine's clock, compared with a server's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.unit.torchmoor.doctor.conftest import MakePlan
from torchmoor.doctor.clock import check_clock, check_fleet_clock
from torchmoor.doctor.finding import Level


class AnotherTime(BaseHTTPRequestHandler):
    """A proxy whose clock, or ours, is wrong."""

    def do_GET(self) -> None:
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return "Sat, 01 Jan 2000 00:00:00 GMT"

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def past_url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), AnotherTime) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


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
