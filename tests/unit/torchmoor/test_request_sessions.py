"""Sessions with a handler's own ids: found by caller and endpoint, with a limit by last use."""

import pytest

from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.errors import ValidationError
from torchmoor.proxy.dispatch.request_sessions import RequestSessions
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry
from torchmoor.wire.session_ids import SessionId

VARIANTS = (VariantSettings(model="m"),)
REGISTRY = Registry([EndpointSettings(name="e", variants=VARIANTS), EndpointSettings(name="other", variants=VARIANTS)])
ENDPOINT, OTHER = REGISTRY.endpoints()
A, B = (Instance(name=name, endpoint="e", model="m", port=1) for name in "ab")


def make(max_sessions: int) -> RequestSessions:
    return RequestSessions(SessionIdSettings(), max_sessions)


def knows(sessions: RequestSessions, name: str) -> bool:
    """Return whether the session is known to its caller; this uses it."""
    try:
        return sessions.get(ENDPOINT, "alice", name.encode()) is not None
    except ValidationError:
        return False


def test_a_session_is_its_callers_at_its_endpoint() -> None:
    """A session is found only for its caller and endpoint; the id has neither an expiry nor a MAC."""
    sessions = make(4)

    opened = sessions.on_opened(ENDPOINT, "alice", b"id; Expires=2030-01-01T00:00:00Z", A)

    assert opened is not None
    assert opened == sessions.get(ENDPOINT, "alice", b"id") == SessionId("id", "a", 0, "")
    for endpoint, principal in ((OTHER, "alice"), (ENDPOINT, "bob")):
        with pytest.raises(ValidationError, match="was not issued by this endpoint"):
            sessions.get(endpoint, principal, b"id")
    sessions.on_closed(ENDPOINT, "bob", opened)
    assert knows(sessions, "id")
    sessions.on_closed(ENDPOINT, "alice", opened)
    sessions.on_closed(ENDPOINT, "alice", opened)
    assert not knows(sessions, "id")


def test_the_least_recently_used_one_is_forgotten_first() -> None:
    """Finding a session or opening it again counts as a use, and does not count it twice."""
    sessions = make(3)
    for name in (b"one", b"two", b"three"):
        sessions.on_opened(ENDPOINT, "alice", name, A)
    sessions.get(ENDPOINT, "alice", b"one")
    sessions.on_opened(ENDPOINT, "alice", b"two", B)

    sessions.on_opened(ENDPOINT, "alice", b"four", A)

    assert not knows(sessions, "three")
    found = {name: sessions.get(ENDPOINT, "alice", name.encode()) for name in ("one", "two", "four")}
    assert {name: session.instance for name, session in found.items() if session is not None} == {
        "one": "a",
        "two": "b",
        "four": "a",
    }


def test_an_id_that_is_added_again_takes_no_further_room() -> None:
    """Opening a known session again evicts no other."""
    sessions = make(2)
    for name in (b"one", b"two", b"two"):
        sessions.on_opened(ENDPOINT, "alice", name, A)

    assert knows(sessions, "one")
    assert knows(sessions, "two")
