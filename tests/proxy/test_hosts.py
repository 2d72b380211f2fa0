"""Proxies on different hosts, which share nothing but the session keys and the list of instances."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proxy.conftest import make_session_id
from tests.proxy.processes import Holding, Served, serving, write_config
from tests.waiting import wait_until

NAMES = ("a", "b", "c")


@pytest.fixture
def holding() -> Iterator[Holding]:
    with Holding(NAMES) as instances:
        yield instances


@pytest.mark.slow
def test_proxies_of_different_hosts_agree_where_sessions_go(holding: Holding, tmp_path: Path) -> None:
    """Both proxies send each session to its instance, and sessions of a dead one to the same others, spread evenly."""
    order = [holding.fakes[name] for name in NAMES]
    one = write_config(tmp_path / "one.yaml", {"chat": order}, sessions={"are_journaled": True})
    other = write_config(tmp_path / "other.yaml", {"chat": order[::-1]}, sessions={"are_journaled": True})
    sessions = [
        make_session_id(name, endpoint="chat", nonce=f"abcdefghijklmno{letter}")
        for name in NAMES
        for letter in "cdefghij"
    ]
    with serving(one, 1) as first, serving(other, 2) as second:
        at_home = [place_of(session, first, second) for session in sessions]
        holding.run(holding.fakes["b"].die())
        wait_until(lambda: first.instances()["b"]["state"] == "down", "the first proxy knows")
        wait_until(lambda: second.instances()["b"]["state"] == "down", "the second proxy knows")
        without_b = [place_of(session, first, second) for session in sessions]

    assert at_home == ["a"] * 8 + ["b"] * 8 + ["c"] * 8
    assert without_b[:8] + without_b[16:] == ["a"] * 8 + ["c"] * 8
    assert set(without_b[8:16]) == {"a", "c"}


def place_of(session: str, *proxies: Served) -> str:
    """Return the instance of a session's turns, through either proxy."""
    places = {proxy.ask(**{"X-Amzn-SageMaker-Session-Id": session}) for proxy in proxies for _ in range(2)}
    assert len(places) == 1, f"the proxies send {session} to {sorted(places)}"
    return places.pop()
