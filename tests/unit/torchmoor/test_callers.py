"""Limits of what each caller uses."""

import gc
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmoor.config.callers import CallerSettings
from torchmoor.config.credentials import Credentials
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.errors import CallerLimited
from torchmoor.proxy.dispatch.caller_sessions import CallerSessions
from torchmoor.proxy.dispatch.callers import Callers
from torchmoor.run.processes.limits import divide

ENDPOINTS = (EndpointSettings(name="chat", variants=(VariantSettings(model="chat"),)),)
WITH_TOKENS = Credentials(tokens={"alice": "token-of-alice-0123456789"})


def test_a_caller_at_its_limit_is_refused_and_others_are_not() -> None:
    """The refusal names the setting and says when to try again."""
    callers = Callers(CallerSettings(max_requests=2), wall=WALL)
    held = [callers.lease_request("alice", "10.0.0.1") for _ in range(2)]

    with pytest.raises(CallerLimited, match=r"callers\.max_requests is 2\. Try again in 1 s\.") as caught:
        callers.lease_request("alice", "10.0.0.2")
    callers.lease_request("bob", "10.0.0.1").release()

    assert (caught.value.status, caught.value.kind, caught.value.retry_after_s) == (429, "ThrottlingException", 1)
    assert callers.num_refused == {"max_requests": 1}
    held[0].release()
    callers.lease_request("alice", "10.0.0.1").release()


def test_a_lease_returns_its_share_once() -> None:
    """Releasing a lease twice does not free another request's share; an idle caller has no entry."""
    callers = Callers(CallerSettings(max_requests=2), wall=WALL)
    first, second = callers.lease_request("alice", ""), callers.lease_request("alice", "")

    first.release()
    first.release()
    assert callers.num_requests == {"alice": 1}

    second.release()
    assert len(callers.num_requests) == 0


def test_without_keys_a_client_address_is_a_caller() -> None:
    """Without keys, a client address is a caller; an IPv6 client counts by its /64 network."""
    callers = Callers(CallerSettings(max_requests=1), wall=WALL)
    callers.lease_request("", "2001:db8::1")
    callers.lease_request("", "10.0.0.1")

    with pytest.raises(CallerLimited):
        callers.lease_request("", "2001:db8::2")
    with pytest.raises(CallerLimited):
        callers.lease_request("", "::ffff:10.0.0.1")
    callers.lease_request("", "2001:db8:0:1::1")


@pytest.mark.parametrize(
    ("limited", "credentials", "applies"),
    [
        ("with-keys", Credentials(), False),
        ("with-keys", WITH_TOKENS, True),
        ("always", Credentials(), True),
        ("never", WITH_TOKENS, False),
    ],
)
def test_limits_apply_with_keys_unless_configured(limited: str, credentials: Credentials, applies: bool) -> None:
    """Without keys all clients would be one caller behind a load balancer, so the default is off."""
    settings = ProxySettings(
        endpoints=ENDPOINTS,
        callers=CallerSettings(limited=limited),
        credentials=credentials,
    )

    assert settings.limits_callers is applies


class Wall:
    """A clock that a test sets, in seconds since 1970."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def open_session(callers: Callers, key: str, *, caller: str = "alice", life_s: float = 3600, idle_s: float = 0) -> None:
    """Open a session through a request that is answered at once. Raises CallerLimited."""
    lease = callers.lease_request(caller, "", opens_session=True, invocation_id=f"{caller} {key}".encode())
    now = WALL.now
    lease.on_opened(key, expires_at=now + (idle_s or life_s), last_at=now + life_s)
    lease.release()


def close_session(callers: Callers, key: str, *, life_s: float = 3600) -> None:
    lease = callers.lease_request("alice", "")
    lease.on_closed(key, WALL.now + life_s)
    lease.release()


WALL = Wall()


def limited(callers: Callers, key: str) -> int:
    """Return the Retry-After of an opening that is refused."""
    with pytest.raises(CallerLimited, match=r"callers\.max_sessions") as caught:
        open_session(callers, key)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


@pytest.fixture
def callers() -> Callers:
    """Return the counts of callers that may have two sessions each."""
    WALL.now = Wall.now
    return Callers(CallerSettings(max_sessions=2), wall=WALL)


def test_an_opening_at_the_limit_is_refused_until_the_first_session_expires(callers: Callers) -> None:
    """Retry-After is the time until the first of the caller's sessions expires; then an opening is accepted."""
    open_session(callers, "first", life_s=600)
    open_session(callers, "second", life_s=59.2)

    assert limited(callers, "third") == 60
    assert callers.num_refused == {"max_sessions": 1}
    assert callers.num_requests == {}
    open_session(callers, "theirs", caller="bob")
    WALL.now += 60
    open_session(callers, "third")
    assert limited(callers, "fourth") == 540


def test_a_close_gives_a_session_back_once(callers: Callers) -> None:
    """A close returns a session once; a repeated close or opening changes no count."""
    open_session(callers, "first")
    open_session(callers, "second")
    close_session(callers, "first")
    close_session(callers, "first")
    assert callers.sessions.count("alice") == 1

    open_session(callers, "first")
    assert callers.sessions.count("alice") == 1
    open_session(callers, "third")
    limited(callers, "fourth")


def test_openings_that_have_not_ended_count(callers: Callers) -> None:
    """Concurrent openings count towards the limit, and a failed one returns its share."""
    leases = [callers.lease_request("alice", "", opens_session=True) for _ in range(2)]
    assert limited(callers, "third") == 1

    leases[0].release()
    leases[0].release()
    open_session(callers, "third")
    limited(callers, "fourth")


def test_an_opening_that_is_sent_again_is_no_other_opening(callers: Callers) -> None:
    """boto3's retry with the same invocation id is accepted at the limit, too, because it opens no other session."""

    def send(key: str, invocation_id: bytes) -> None:
        lease = callers.lease_request("alice", "", opens_session=True, invocation_id=invocation_id)
        lease.on_opened(key, expires_at=WALL.now + 60, last_at=WALL.now + 60)
        lease.release()

    send("first", b"call 1")
    send("second", b"call 2")
    send("first", b"call 1")

    with pytest.raises(CallerLimited):
        send("third", b"call 3")
    assert callers.lease_request("alice", "", invocation_id=b"call 3").has_all_sessions
    assert not callers.lease_request("alice", "", invocation_id=b"call 1").has_all_sessions
    close_session(callers, "first")
    send("third", b"call 3")
    with pytest.raises(CallerLimited):
        send("first", b"call 1")
    send("fourth", b"call 2")  # a third-party instance does not recognize it
    with pytest.raises(CallerLimited):
        send("fifth", b"call 2")


def test_a_session_that_its_instance_lost_counts_no_more(callers: Callers) -> None:
    """A session no longer counts once an answer to its turn says that it is lost."""
    open_session(callers, "first")
    lease = callers.lease_request("alice", "")
    lease.on_turn("first", is_lost=False)
    assert callers.sessions.count("alice") == 1
    lease.on_turn("first", is_lost=True)

    assert callers.sessions.count("alice") == 0


def test_turns_keep_a_session_that_expires_by_being_idle(callers: Callers) -> None:
    """Each turn restarts the idle time of a session, up to the expiry in its id."""
    open_session(callers, "first", life_s=100, idle_s=60)
    lease = callers.lease_request("alice", "")
    WALL.now += 50
    lease.on_turn("first", is_lost=False)
    WALL.now += 40
    assert callers.sessions.count("alice") == 1
    lease.on_turn("first", is_lost=False)
    WALL.now += 10
    assert callers.sessions.count("alice") == 0


def test_a_session_of_another_process_is_given_back_where_it_is_closed(callers: Callers) -> None:
    """Closing a session of another process allows one more opening here, until the session would have expired."""
    close_session(callers, "elsewhere", life_s=50)
    close_session(callers, "elsewhere", life_s=50)
    for key in ("first", "second", "third"):
        open_session(callers, key)
    limited(callers, "fourth")
    WALL.now += 50
    close_session(callers, "third")
    limited(callers, "fourth")
    close_session(callers, "second")
    open_session(callers, "fourth")


def test_closed_sessions_and_idle_callers_take_no_memory(callers: Callers) -> None:
    """The memory for callers is limited for any number of openings and closes."""

    def churn(count: int) -> None:
        for number in range(count):
            open_session(callers, f"session {number}")
            close_session(callers, f"session {number}")
            open_session(callers, "own", caller=f"caller {number}", life_s=1)
            WALL.now += 1

    churn(500)
    tracemalloc.start()
    try:
        churn(5000)
        gc.collect()
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert num_bytes < 100_000


STEPS = st.tuples(
    st.sampled_from(("begin", "end", "open", "open", "use", "close", "lose", "wait", "wait")),
    st.sampled_from("ab"),
    st.integers(0, 4),
    st.sampled_from((0.5, 3.0, 8.0)),
)


@given(st.lists(STEPS, max_size=40))
def test_sessions_count_until_they_are_closed_or_expire(steps: list[tuple[str, str, int, float]]) -> None:
    """As in a plain table of all sessions, in which a turn moves the expiry, at most to the end of the longest life."""
    now, most = 1000.0, 3
    sessions = CallerSessions(most, wall=lambda: now)
    table: dict[tuple[str, int], tuple[float, float, float]] = {}  # expiry, the latest expiry, time without turns
    openings, closed = {"a": 0, "b": 0}, set[tuple[str, int]]()

    def count(caller: str) -> int:
        return openings[caller] + sum(at > now and key[0] == caller for key, (at, _, _) in table.items())

    for step, caller, number, seconds in steps:
        key = (caller, number)
        expires_at, last_at, idle_s = table.get(key, (0.0, 0.0, 0.0))
        is_open = expires_at > now
        match step:
            case "begin":
                has_begun = sessions.try_begin_opening(caller, b"")
                assert has_begun == (count(caller) < most)
                openings[caller] += has_begun
            case "end" if openings[caller]:
                sessions.end_opening(caller)
                openings[caller] -= 1
            case "open":
                sessions.opened(caller, key, expires_at=now + seconds, last_at=now + 2 * seconds)
                if not is_open and key not in closed:
                    table[key] = (now + seconds, now + 2 * seconds, seconds)
            case "use":
                sessions.used(caller, key)
                if is_open:
                    table[key] = (min(last_at, now + idle_s), last_at, idle_s)
            case "close" if is_open and len(closed) < most:
                sessions.closed(caller, key, expires_at=last_at)
                del table[key]
                closed.add(key)
            case "lose":
                sessions.lost(caller, key)
                table.pop(key, None)
            case "wait":
                now += seconds
        assert [sessions.count(each) for each in openings] == [count(each) for each in openings]


def test_each_process_has_its_part() -> None:
    """Several processes together allow the configured number."""
    settings = ProxySettings(endpoints=ENDPOINTS, callers=CallerSettings(max_requests=6, max_sessions=9))
    part = divide(settings, 4).callers

    assert (part.max_requests, part.max_sessions) == (2, 3)
