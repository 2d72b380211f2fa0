"""Sessions with a handler's own ids: found by caller and endpoint, with a limit by last use."""

from torchmoor.proxy.routing.foreign_sessions import ForeignSessions
from torchmoor.wire.session_ids import SessionId

MINE = {"endpoint": "e", "principal": "alice"}


def test_a_session_is_its_callers_at_its_endpoint() -> None:
    """A session is found only for its caller and endpoint; the id has neither an expiry nor a MAC."""
    sessions = ForeignSessions(max_sessions=4)

    added = sessions.add("id", "a", **MINE)

    assert added == sessions.find("id", **MINE) == SessionId("id", "a", 0, "")
    assert len(sessions) == 1
    assert sessions.find("id", endpoint="other", principal="alice") is None
    assert sessions.find("id", endpoint="e", principal="bob") is None
    assert len(sessions) == 1
    sessions.remove("id", endpoint="e", principal="bob")
    assert len(sessions) == 1
    sessions.remove("id", **MINE)
    sessions.remove("id", **MINE)
    assert (sessions.find("id", **MINE), len(sessions)) == (None, 0)


def test_the_least_recently_used_one_is_forgotten_first() -> None:
    """Finding a session or adding it again counts as a use, and does not count it twice."""
    sessions = ForeignSessions(max_sessions=3)
    for name in ("one", "two", "three"):
        sessions.add(name, "a", **MINE)
    sessions.find("one", **MINE)
    sessions.add("two", "b", **MINE)

    sessions.add("four", "a", **MINE)

    assert len(sessions) == 3
    found = {name: sessions.find(name, **MINE) for name in ("one", "two", "three", "four")}
    assert {name: session.instance for name, session in found.items() if session is not None} == {
        "one": "a",
        "two": "b",
        "four": "a",
    }


def test_an_id_that_is_added_again_takes_no_further_room() -> None:
    """Adding a known id again evicts no other session."""
    sessions = ForeignSessions(max_sessions=2)
    for name in ("one", "two", "two"):
        sessions.add(name, "a", **MINE)

    assert all(sessions.find(name, **MINE) is not None for name in ("one", "two"))
