"""The session store: lifetimes, turns, and the blocks and images that sessions hold."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from handlers.chat.images.store import Image, ImageStore
from handlers.chat.sessions import store as store_module
from handlers.chat.sessions.expiry import ExpiryOrder
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.chat.sessions.session_images import SessionImages
from handlers.chat.sessions.store import SessionStore
from handlers.chat.sessions.tombstones import Tombstones
from handlers.chat.sessions.turn_queues import TurnQueues
from handlers.engine.builtin.kv_cache import BLOCK, BlockPool, CacheShape
from handlers.errors import (
    HandlerError,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    SessionClosed,
    SessionExpired,
    SessionLost,
    SessionUnknown,
)
from handlers.requests.incoming import Caller
from handlers.settings.session import ChatSessionSettings
from handlers.worker.counters import Counters
from torchmoor.wire.session_ids import SessionId

SHAPE = CacheShape(2, 1, 4, torch.float32, torch.device("cpu"))
FEATURES_BYTES = 5 * 4 * 4
IDS = SessionIdMinter({"k0": b"k" * 32}, "local")


class FakeTurn:
    """A fake turn that can be stopped."""

    def __init__(self) -> None:
        self.stopped_by: HandlerError | None = None

    def stop(self, error: HandlerError) -> None:
        self.stopped_by = error


def new_turn() -> Any:
    return FakeTurn()


class Stores:
    """Create stores that are audited at the end of the test."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.made: list[SessionStore] = []

    def __call__(self, *, capacity: int = 64, is_durable: bool = False, **settings: Any) -> SessionStore:
        """Create a store. capacity: of the pool, in blocks. is_durable: a journal has the sessions."""
        images = ImageStore(
            1 << 20,
            1 << 20,
            False,
            lambda encoded, check: Pillow.new("RGB", (2, 2), (encoded[0], 0, 0)),
            lambda picture: torch.zeros(5, 4),
            Counters(),
        )
        pool = BlockPool(SHAPE, capacity * SHAPE.block_bytes)
        values = {"ttl_s": 100, "tombstone_s": 3600, **settings}
        store = SessionStore(
            ChatSessionSettings(**values), IDS, pool, images, Counters(), self.clock, is_durable=is_durable
        )
        self.made.append(store)
        return store


@pytest.fixture
def new_store(clock: Any) -> Iterator[Stores]:
    stores = Stores(clock)
    yield stores
    for store in stores.made:
        store.check_integrity()


def opened(store: SessionStore, ttl_s: float = 100) -> Session:
    """Open a session whose opening is recorded."""
    session = store.open(ttl_s, Caller("e", "p"))
    store.unhold(session)
    return session


def get(store: SessionStore, session: Session) -> Session:
    return store.get(session.id.text, Caller("e", "p"))


def image(store: SessionStore, colour: int = 1) -> Image:
    """Return an image that is held once, for its session."""
    return store.images.take_in(Caller("e", "p").scope, bytes([colour]))


def held_bytes(store: SessionStore) -> int:
    """Return the bytes that the store's sessions hold in pool and images."""
    return store.pool.used_bytes + store.images.features_bytes + store.images.host_bytes


def dequeue(store: SessionStore, session: Session, turn: Any) -> Any:
    """Return the next turn."""
    return TurnQueues(store).dequeue(session, turn)


def begin_turn(store: SessionStore, session: Session, num_tokens: int) -> Any:
    """Begin a turn over a conversation of this many positions, unlike any other session's."""
    turn: Any = FakeTurn()
    assert TurnQueues(store).enqueue(session, turn)
    session.cache.truncate(0)
    session.cache.reserve(num_tokens)
    session.cache.advance([hash(session.id.text), *range(1, num_tokens)])
    return turn


def run_turn(store: SessionStore, session: Session, num_tokens: int) -> None:
    """Run a whole turn that leaves this many positions in the cache."""
    assert TurnQueues(store).dequeue(session, begin_turn(store, session, num_tokens)) is None


def test_open_session_is_found(new_store: Stores) -> None:
    """An id finds its session for the same endpoint and caller only."""
    store = new_store()
    session = opened(store)

    assert get(store, session) is session
    assert store.session_ids() == [session.id.text]
    with pytest.raises(SessionUnknown):
        store.get(session.id.text, Caller("e", "other"))


def test_expiry_is_absolute(new_store: Stores, clock: Any) -> None:
    """Use does not prolong a session; at its expiry it is gone and its memory is free."""
    store = new_store()
    session = opened(store, 100)
    SessionImages(store).add(session, [image(store)])

    clock.advance(99)
    assert get(store, session) is session
    clock.advance(1)
    with pytest.raises(SessionExpired):
        get(store, session)

    assert len(store) == 0
    assert held_bytes(store) == 0


def test_expired_sessions_go_without_being_asked_for(new_store: Stores, clock: Any) -> None:
    """Expired sessions are freed without a request."""
    store = new_store()
    session = opened(store, 100)
    run_turn(store, session, 10)
    keep = opened(store, 200)

    clock.advance(100)
    store.expire()

    assert store.session_ids() == [keep.id.text]
    assert held_bytes(store) == 0


def test_closed_and_expired_differ_and_are_forgotten(new_store: Stores, clock: Any) -> None:
    """For tombstone_s the store knows why a session ended; afterwards its id is unknown."""
    store = new_store(tombstone_s=50)
    closed, expired = opened(store, 100), opened(store, 100)

    clock.advance(80)
    store.close(closed)
    clock.advance(20)
    store.expire()

    for _ in range(2):
        with pytest.raises(SessionClosed):
            get(store, closed)
        with pytest.raises(SessionExpired):
            get(store, expired)
        clock.advance(29)
    clock.advance(-8)  # 50 s after the expiry
    store.expire()
    for session in (closed, expired):
        with pytest.raises(SessionUnknown):
            get(store, session)


def test_old_tombstones_take_no_memory(clock: Any) -> None:
    """A tombstone is kept until both its own time and its id's are over."""
    tombstones = Tombstones(ChatSessionSettings(tombstone_s=50))
    for ttl_s in (10, 100):
        tombstones.add(IDS.mint(int(clock.now + ttl_s), Caller("e", "p")), SessionClosed, clock.now)

    lengths = []
    for seconds in (0, 59, 60, 149, 150):
        tombstones.forget_old(clock.now + seconds)
        lengths.append(len(tombstones))

    assert lengths == [2, 2, 1, 1, 0]


def test_closed_id_never_looks_lost(new_store: Stores, clock: Any) -> None:
    """A session closed long before its expiry is unknown after its tombstone, not "lost in a restart"."""
    store = new_store(tombstone_s=50, max_ttl_s=10_000)
    session = opened(store, 10_000)
    store.close(session)

    clock.advance(51)
    store.expire()

    with pytest.raises(SessionUnknown):
        get(store, session)


def test_session_of_a_worker_that_restarted_is_lost(new_store: Stores, clock: Any) -> None:
    """A valid, unexpired id without a session is distinguished from a forged one."""
    session = opened(new_store(), 100)
    restarted = new_store(tombstone_s=50)

    with pytest.raises(SessionLost):
        get(restarted, session)
    clock.advance(100)
    with pytest.raises(SessionExpired):
        get(restarted, session)
    clock.advance(50)
    with pytest.raises(SessionUnknown):
        get(restarted, session)


@pytest.mark.parametrize("text", ["", "nonsense", "ts-seq-" + "a" * 90])
def test_forged_id_is_unknown(new_store: Stores, text: str) -> None:
    """An id that was never minted is 404, not 410."""
    with pytest.raises(SessionUnknown) as caught:
        new_store().get(text, Caller("e", "p"))

    assert caught.value.status == 404


def test_each_end_has_its_own_code_and_message(new_store: Stores, clock: Any) -> None:
    """Unknown, expired, closed and lost sessions have different codes and messages."""
    store = new_store()
    closed, expired = opened(store), opened(store, 1)
    lost = opened(new_store())
    store.close(closed)
    clock.advance(1)

    said = set()
    for text in ("x", closed.id.text, expired.id.text, lost.id.text):
        with pytest.raises(HandlerError) as caught:
            store.get(text, Caller("e", "p"))
        said.add((caught.value.code, caught.value.status, caught.value.message))

    assert {(code, status) for code, status, _ in said} == {
        ("SessionUnknown", 404),
        ("SessionClosed", 410),
        ("SessionExpired", 410),
        ("SessionLost", 410),
    }
    assert len({message for *_, message in said}) == 4


def test_tombstones_are_bounded(new_store: Stores) -> None:
    """Beyond the limit, the oldest tombstones are forgotten first."""
    store = new_store(max_tombstones=3)
    sessions = [opened(store) for _ in range(5)]
    for session in sessions:
        store.close(session)

    store.expire()

    for session in sessions[:2]:
        with pytest.raises(SessionLost):
            get(store, session)
    for session in sessions[2:]:
        with pytest.raises(SessionClosed):
            get(store, session)


def test_closing_twice_is_harmless(new_store: Stores) -> None:
    """The second of two concurrent closes changes nothing."""
    store = new_store()
    session = opened(store)

    store.close(session)
    store.close(session)

    assert len(store) == 0


def test_sessions_are_limited(new_store: Stores, clock: Any) -> None:
    """One more than max_sessions is Overloaded until a session has ended, also by expiry."""
    store = new_store(max_sessions=2)
    opened(store, 10)
    opened(store, 20)

    with pytest.raises(Overloaded) as caught:
        opened(store)
    clock.advance(10)
    opened(store)

    assert caught.value.retry_after_s is not None
    assert len(store) == 2


def test_a_session_holds_its_blocks_and_its_images_until_it_ends(new_store: Stores) -> None:
    """Closing releases all blocks and images of a session, and none of another's."""
    store = new_store()
    session, other = opened(store), opened(store)
    SessionImages(store).add(session, [image(store, 1), image(store, 2)])
    SessionImages(store).add(other, [image(store, 1)])
    run_turn(store, session, 2 * BLOCK + 1)
    assert store.pool.num_used == 3
    assert store.images.features_bytes == 2 * FEATURES_BYTES

    store.close(session)

    assert store.pool.num_used == 0
    assert store.images.features_bytes == FEATURES_BYTES


def test_end_of_a_turn_gives_back_what_it_did_not_use(new_store: Stores) -> None:
    """A turn that reserved memory for a long answer keeps the blocks of its real length only."""
    store = new_store()
    session = opened(store)
    turn: Any = FakeTurn()
    TurnQueues(store).enqueue(session, turn)
    session.cache.reserve(40 * BLOCK)
    assert store.pool.num_used == 40

    session.cache.advance([1, 2, 3])
    TurnQueues(store).dequeue(session, turn)

    assert store.pool.num_used == 1
    assert session.cache.tokens == [1, 2, 3]


def test_least_recently_used_idle_sessions_lose_their_cache_first(new_store: Stores, clock: Any) -> None:
    """As many idle caches as necessary are evicted, the least recently used first; images stay."""
    store = new_store(capacity=6)
    sessions = [opened(store) for _ in range(3)]
    for i, session in enumerate(sessions):
        SessionImages(store).add(session, [image(store, i)])
        run_turn(store, session, 2 * BLOCK)
    run_turn(store, sessions[0], 2 * BLOCK)  # used again: now the second is the oldest

    run_turn(store, opened(store), BLOCK)

    assert [s.cache.length for s in sessions] == [2 * BLOCK, 0, 2 * BLOCK]
    assert all(s.pending_images for s in sessions)
    assert store.pool.num_evicted == 1


def test_pinned_sessions_never_lose_their_cache(new_store: Stores) -> None:
    """A session with a turn keeps its cache, even if it is the oldest."""
    store = new_store(capacity=3)
    pinned, idle, newcomer = (opened(store) for _ in range(3))
    run_turn(store, pinned, BLOCK)
    run_turn(store, idle, BLOCK)
    turn: Any = FakeTurn()
    TurnQueues(store).enqueue(pinned, turn)

    run_turn(store, newcomer, 2 * BLOCK)

    assert pinned.cache.length == BLOCK
    assert idle.cache.length == 0
    TurnQueues(store).dequeue(pinned, turn)


def test_a_session_stays_pinned_while_turns_wait(new_store: Stores) -> None:
    """A session keeps its cache between two consecutive turns."""
    store = new_store(capacity=2)
    session = opened(store)
    first = begin_turn(store, session, 2 * BLOCK)
    second: Any = FakeTurn()
    TurnQueues(store).enqueue(session, second)
    assert dequeue(store, session, first) is second

    with pytest.raises(OutOfMemory):
        opened(store).cache.reserve(1)

    assert session.cache.length == 2 * BLOCK
    TurnQueues(store).dequeue(session, second)


def test_out_of_memory_changes_nothing(new_store: Stores) -> None:
    """A turn that would not fit even without the idle caches is refused before any is evicted."""
    store = new_store(capacity=3)
    idle, asking = opened(store), opened(store)
    run_turn(store, idle, BLOCK)
    turn = begin_turn(store, asking, BLOCK)

    with pytest.raises(OutOfMemory) as caught:
        asking.cache.reserve(4 * BLOCK)

    assert caught.value.status == 507
    assert (idle.cache.length, asking.cache.length) == (BLOCK, BLOCK)
    assert store.pool.num_used == 2
    assert store.pool.num_evicted == 0
    TurnQueues(store).dequeue(asking, turn)


def test_images_of_a_session_are_limited(new_store: Stores) -> None:
    """Images of earlier questions count as well as those that wait for the next one."""
    store = new_store(max_images=2)
    session = opened(store)
    first, second, third = (image(store, i) for i in range(3))
    SessionImages(store).add(session, [first])
    SessionImages(store).commit(session, [], [first])

    with pytest.raises(InvalidRequest):
        SessionImages(store).add(session, [second, third])
    SessionImages(store).add(session, [second])
    store.images.release(third)  # the caller still holds the refused image

    assert len(session.images) + len(session.pending_images) == 2


def test_images_added_while_a_turn_runs_wait_for_the_next_question(new_store: Stores) -> None:
    """A turn takes the images present at its beginning; later ones stay pending through its commit."""
    store = new_store()
    session = opened(store)
    mine, later = image(store, 1), image(store, 2)
    turn: Any = FakeTurn()
    TurnQueues(store).enqueue(session, turn)
    SessionImages(store).add(session, [mine])

    SessionImages(store).add(session, [later])
    SessionImages(store).commit(session, [{"role": "user"}], [mine])
    TurnQueues(store).dequeue(session, turn)

    assert session.images == [mine]
    assert session.pending_images == [later]


def test_what_is_committed_stays_unless_the_session_is_over(new_store: Stores) -> None:
    """What is committed to an open session stays; a commit to an ended one keeps no image."""
    store = new_store()
    session, ended = opened(store), opened(store)
    mine, gone = image(store, 1), image(store, 2)
    SessionImages(store).add(session, [mine])
    SessionImages(store).add(ended, [gone])

    SessionImages(store).commit(session, [{"role": "user"}], [mine])
    store.close(ended)
    SessionImages(store).commit(ended, [{"role": "user"}], [gone])

    assert store.images.features_bytes == FEATURES_BYTES
    assert (session.images, ended.images) == ([mine], [])


def test_images_of_a_failed_question_are_dropped(new_store: Stores) -> None:
    """Only the failed question's own images are released; an equal earlier one and its features stay."""
    store = new_store()
    session = opened(store)
    early, mine = image(store, 1), image(store, 1)
    SessionImages(store).add(session, [early])
    SessionImages(store).add(session, [mine])

    SessionImages(store).drop(session, [mine])

    assert session.pending_images == [early]
    assert store.images.features_bytes == FEATURES_BYTES
    SessionImages(store).drop(session, [early])
    assert held_bytes(store) == 0


def test_an_image_that_is_dropped_is_not_an_equal_one_before_it(new_store: Stores) -> None:
    """An equal earlier image keeps its place, so that images wait in the order of the journal."""
    store = new_store()
    session = opened(store)
    early, between, mine = image(store, 1), image(store, 2), image(store, 1)
    SessionImages(store).add(session, [early, between])
    SessionImages(store).add(session, [mine])

    SessionImages(store).drop(session, [mine])

    assert session.pending_images == [early, between]


def test_turns_wait_in_order(new_store: Stores) -> None:
    """One turn runs at a time; the session then passes to the oldest waiting turn."""
    store = new_store()
    session = opened(store)
    _, second, third = turns = [new_turn() for _ in range(3)]

    assert [TurnQueues(store).enqueue(session, turn) for turn in turns] == [True, False, False]
    assert dequeue(store, session, turns[0]) is second
    assert dequeue(store, session, turns[1]) is third
    assert TurnQueues(store).dequeue(session, turns[2]) is None
    assert session.turn is None


def test_waiting_turns_are_bounded(new_store: Stores) -> None:
    """Beyond max_waiting_turns a question is Overloaded, until another has left the queue."""
    store = new_store(max_waiting_turns=2)
    session = opened(store)
    turns: list[Any] = [FakeTurn() for _ in range(4)]
    for turn in turns[:3]:
        TurnQueues(store).enqueue(session, turn)

    with pytest.raises(Overloaded):
        TurnQueues(store).enqueue(session, turns[3])
    assert TurnQueues(store).dequeue(session, turns[1]) is None
    assert TurnQueues(store).enqueue(session, turns[3]) is False

    assert dequeue(store, session, turns[0]) is turns[2]
    assert dequeue(store, session, turns[2]) is turns[3]
    assert TurnQueues(store).dequeue(session, turns[3]) is None


def test_dequeue_of_a_turn_that_is_over_does_nothing(new_store: Stores) -> None:
    """Ending a turn twice does not end its successor."""
    store = new_store()
    session = opened(store)
    _, second = turns = [new_turn() for _ in range(2)]
    for turn in turns:
        TurnQueues(store).enqueue(session, turn)

    TurnQueues(store).dequeue(session, turns[0])
    assert TurnQueues(store).dequeue(session, turns[0]) is None

    assert session.turn is second
    TurnQueues(store).dequeue(session, turns[1])


def test_close_stops_the_running_turn_and_frees_the_memory_after_it(new_store: Stores) -> None:
    """A close stops the turn at once; its memory is counted until the turn releases it."""
    store = new_store()
    session = opened(store)
    SessionImages(store).add(session, [image(store)])
    turn = begin_turn(store, session, 1)

    store.close(session)

    assert isinstance(turn.stopped_by, SessionClosed)
    assert len(store) == 0
    assert (store.pool.num_used, store.images.features_bytes) == (1, FEATURES_BYTES)
    store.check_integrity()
    TurnQueues(store).dequeue(session, turn)
    assert held_bytes(store) == 0


def test_expiry_lets_the_running_turn_finish(new_store: Stores, clock: Any) -> None:
    """No turn can start in an expired session, but the running answer continues."""
    store = new_store()
    session = opened(store, 10)
    turn = begin_turn(store, session, 1)

    clock.advance(10)
    store.expire()

    assert turn.stopped_by is None
    with pytest.raises(SessionExpired):
        get(store, session)
    other: Any = FakeTurn()
    with pytest.raises(SessionExpired):
        TurnQueues(store).enqueue(session, other)
    assert store.pool.num_used == 1
    TurnQueues(store).dequeue(session, turn)
    assert held_bytes(store) == 0


def test_ended_session_hands_itself_to_waiting_turns_until_none_is_left(new_store: Stores) -> None:
    """Turns that wait in an ended session each get the error, one by one; then the memory is freed."""
    store = new_store()
    session = opened(store)
    first = begin_turn(store, session, 1)
    second: Any = FakeTurn()
    TurnQueues(store).enqueue(session, second)

    store.close(session)
    assert dequeue(store, session, first) is second
    store.check_integrity()
    assert TurnQueues(store).dequeue(session, second) is None

    assert held_bytes(store) == 0
    assert store.count_waiting() == 0


def test_ended_session_takes_no_images(new_store: Stores) -> None:
    """An image that was loaded while its session ended is refused; its loader still holds it and must release it."""
    store = new_store()
    session = opened(store)
    store.close(session)
    late = image(store)

    with pytest.raises(SessionClosed):
        SessionImages(store).add(session, [late])

    store.images.release(late)
    assert held_bytes(store) == 0


def test_discarded_opening_leaves_no_trace(new_store: Stores) -> None:
    """A session whose id reached no client is not remembered as closed."""
    store = new_store()
    session = opened(store)
    SessionImages(store).add(session, [image(store)])

    lose(store, session)

    assert len(store) == 0
    assert held_bytes(store) == 0
    with pytest.raises(SessionLost):
        get(store, session)


def test_audit_finds_an_image_that_no_session_holds(clock: Any) -> None:
    """check_integrity compares the images' holders with the sessions."""
    store = Stores(clock)()
    image(store)

    with pytest.raises(RuntimeError, match="holders and pins do not match"):
        store.check_integrity()


def test_audit_finds_blocks_that_no_session_holds(clock: Any) -> None:
    """check_integrity compares the pool's count with the sessions' tables."""
    store = Stores(clock)()
    store.pool.take(1, None)

    with pytest.raises(RuntimeError, match="holders"):
        store.check_integrity()


def test_repr_tells_the_state(new_store: Stores) -> None:
    """The repr shows whether a session is idle, running or ended."""
    store = new_store()
    session = opened(store)
    turn: Any = FakeTurn()

    seen = [repr(session)]
    TurnQueues(store).enqueue(session, turn)
    seen.append(repr(session))
    store.close(session)
    seen.append(repr(session))
    TurnQueues(store).dequeue(session, turn)

    assert [word in text for word, text in zip(("idle", "running", "ended"), seen, strict=True)] == [True] * 3


def test_names_with_a_separator_in_them_share_no_scope() -> None:
    """Endpoint and caller are unambiguous in a scope, whatever characters they contain."""
    assert Caller("a|b", "c").scope != Caller("a", "b|c").scope
    assert Caller('a", "b', "c").scope != Caller("a", 'b", "c').scope


def test_a_full_store_evicts_the_session_that_was_used_least_recently(new_store: Stores) -> None:
    """The evicted session looks lost, so that its next request reads the journal; its features stay while they fit."""
    store = new_store(is_durable=True, max_sessions=2)
    first, second = opened(store), opened(store)
    run_turn(store, first, 20)
    SessionImages(store).add(second, [image(store)])
    store.unhold(store.hold(first.id.text, Caller("e", "p")))

    third = opened(store)

    assert store.counters.get("sessions_evicted") == 1
    assert store.session_ids() == [first.id.text, third.id.text]
    with pytest.raises(SessionLost):
        get(store, second)
    assert (len(store.images), store.images.host_bytes, store.images.features_bytes) == (1, 0, FEATURES_BYTES)
    store.images.release(image(store))
    assert len(store.images) == 0
    store.check_integrity()


def test_sessions_in_use_are_not_evicted(new_store: Stores) -> None:
    """A turn, a hold and an operator's pin each keep a session; with nothing else to evict, an opening is refused."""
    store = new_store(is_durable=True, max_sessions=3)
    busy, held, pinned = opened(store), opened(store), opened(store)
    turn = begin_turn(store, busy, 20)
    store.hold(held.id.text, Caller("e", "p"))
    TurnQueues(store).pin(pinned)

    with pytest.raises(Overloaded, match="3 sessions are open, the most this worker holds"):
        opened(store)
    dequeue(store, busy, turn)
    opened(store)

    assert get(store, held) is held
    assert get(store, pinned) is pinned
    with pytest.raises(SessionLost):
        get(store, busy)
    store.unhold(held)
    TurnQueues(store).unpin(pinned)
    opened(store)
    opened(store)
    assert store.counters.get("sessions_evicted") == 3


def test_an_evicted_session_takes_no_turn_and_no_pin(new_store: Stores) -> None:
    """A request that found the session before its eviction is sent to the journal."""
    store = new_store(is_durable=True, max_sessions=1)
    session = opened(store)
    opened(store)
    turn: Any = FakeTurn()

    with pytest.raises(SessionLost):
        TurnQueues(store).enqueue(session, turn)
    with pytest.raises(SessionLost):
        TurnQueues(store).pin(session)


def lose(store: SessionStore, session: Session) -> None:
    store.lose(session.id.text, SessionLost())


@pytest.mark.parametrize("end", [SessionStore.close, lose])
def test_a_session_that_was_evicted_and_read_again_ends_with_the_first_one(
    new_store: Stores, end: Callable[[SessionStore, Session], None]
) -> None:
    """A request that ends the session it found before the eviction ends the one that has taken its place."""
    store = new_store(is_durable=True, max_sessions=1)
    first = opened(store)
    opened(store)
    again = store.adopt(first.id.text, Caller("e", "p"))
    store.unhold(again)
    turn = begin_turn(store, again, 20)
    SessionImages(store).add(again, [image(store)])

    end(store, first)

    assert isinstance(turn.stopped_by, SessionClosed | SessionLost)
    assert dequeue(store, again, turn) is None
    assert (len(store), held_bytes(store)) == (0, 0)


def test_a_full_store_ends_expired_sessions_first(new_store: Stores, clock: Any) -> None:
    """No session is evicted while an expired one takes its place."""
    store = new_store(is_durable=True, max_sessions=2)
    kept, _expired = opened(store, 100), opened(store, 10)

    clock.advance(11)
    opened(store)

    assert get(store, kept) is kept
    assert store.counters.get("sessions_evicted") == 0


@pytest.mark.parametrize(("limits", "retry_after_s"), [({}, 20), ({"idle_ttl_s": 25}, 15)])
def test_without_a_journal_a_refused_opening_states_when_a_session_expires(
    new_store: Stores, clock: Any, limits: dict[str, int], retry_after_s: int
) -> None:
    """Retry-After is the time until the first session expires, by idleness or by the expiry in its id."""
    store = new_store(max_sessions=2, **limits)
    opened(store, 100)
    opened(store, 30)
    clock.advance(10.5)

    with pytest.raises(
        Overloaded, match=rf"2 sessions are open, .*: the first one expires in {retry_after_s} s"
    ) as refused:
        opened(store)

    assert refused.value.retry_after_s == retry_after_s


@pytest.mark.parametrize("num_sessions", [100, 1000])
def test_choosing_the_session_to_evict_reads_no_other_session(new_store: Stores, num_sessions: int) -> None:
    """Evictions happen in the order of last use, whatever the number of sessions."""
    store = new_store(is_durable=True, max_sessions=num_sessions)
    sessions = [opened(store) for _ in range(num_sessions)]

    for evicted in sessions[:20]:
        opened(store)
        with pytest.raises(SessionLost):
            get(store, evicted)

    assert get(store, sessions[20]) is sessions[20]


class VisitedSession(Session):
    """A session that notes each access to its fields."""

    __slots__ = ()
    visited: ClassVar[set[Session]] = set()

    def __getattribute__(self, name: str) -> Any:
        VisitedSession.visited.add(self)
        return super().__getattribute__(name)


@pytest.mark.parametrize("is_durable", [True, False])
@pytest.mark.parametrize("num_sessions", [100, 1000])
def test_a_full_store_visits_few_sessions(
    new_store: Stores, clock: Any, monkeypatch: pytest.MonkeyPatch, num_sessions: int, is_durable: bool
) -> None:
    """An opening, a refused one and an expiry visit only the sessions that come or go, however many there are."""
    monkeypatch.setattr(store_module, "Session", VisitedSession)
    store = new_store(is_durable=is_durable, max_sessions=num_sessions, ttl_s=10_000)
    oldest = opened(store, 100)
    for number in range(num_sessions - 1):
        opened(store, 200 + number % 5000)
    VisitedSession.visited.clear()

    with suppress(Overloaded):
        opened(store, 5000)
    assert len(VisitedSession.visited) == (2 if is_durable else 1)
    VisitedSession.visited.clear()
    clock.advance(101)
    store.expire()
    opened(store, 5000)

    assert len(VisitedSession.visited) == 2
    with pytest.raises(SessionExpired):
        get(store, oldest)


class Expiring:
    """The fields of a session that the order uses."""

    def __init__(self, expires_at: int) -> None:
        self.id = SessionId("", "local", expires_at, "k0")


@given(times=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20), st.booleans()), max_size=30))
def test_sessions_expire_in_their_order(times: list[tuple[int, int, bool]]) -> None:
    """After any additions and removals, the order knows the first expiry and returns each expired session once."""
    order, now = ExpiryOrder(), 0
    model: dict[Any, int] = {}
    for waited, ttl_s, is_removed in times:
        now += waited
        due = {session for session, expiry in model.items() if expiry <= now}
        assert set(order.remove_expired(now)) == due
        model = {session: expiry for session, expiry in model.items() if session not in due}
        session: Any = Expiring(now + ttl_s)
        order.add(session)
        model[session] = now + ttl_s
        if is_removed:
            gone = min(model, key=lambda each: model[each])
            order.remove(gone)
            order.remove(gone)
            del model[gone]
        order.check_integrity(model)
        assert order.first() == min(model.values(), default=None)


def test_a_session_that_is_not_used_expires(new_store: Stores, clock: Any) -> None:
    """Each use delays its end, at most to the expiry in its id; afterwards it is expired like any other."""
    store = new_store(ttl_s=100, idle_ttl_s=30)
    session, forgotten = opened(store), opened(store)
    for _ in range(3):
        clock.advance(29)
        store.unhold(store.hold(session.id.text, Caller("e", "p")))

    assert store.expires_at(session.id) == session.id.expires_at
    with pytest.raises(SessionExpired):
        get(store, forgotten)
    clock.advance(13)
    with pytest.raises(SessionExpired):
        get(store, session)
    assert len(store) == 0


def test_idle_sessions_expire_without_being_asked_for(new_store: Stores, clock: Any) -> None:
    """Idle sessions expire and release their memory without a request; pinned ones and those in use stay."""
    store = new_store(ttl_s=100, idle_ttl_s=30)
    idle, busy, held, pinned = (opened(store) for _ in range(4))
    run_turn(store, idle, 20)
    turn = begin_turn(store, busy, 20)
    store.hold(held.id.text, Caller("e", "p"))
    TurnQueues(store).pin(pinned)
    clock.advance(31)

    assert not store.holds(idle.id.text)
    store.expire()

    assert store.session_ids() == [busy.id.text, held.id.text, pinned.id.text]
    dequeue(store, busy, turn)
    store.unhold(held)
    assert store.expires_at(busy.id) == clock.now + 30
    TurnQueues(store).unpin(pinned)


def test_with_a_journal_an_idle_session_does_not_expire(new_store: Stores, clock: Any) -> None:
    """It is evicted when its place is needed, and its id stays valid."""
    store = new_store(is_durable=True, ttl_s=100, idle_ttl_s=30)
    session = opened(store)
    clock.advance(31)
    store.expire()

    assert get(store, session) is session
    assert store.expires_at(session.id) == session.id.expires_at


def test_a_clock_that_jumps_ends_no_session_too_early(new_store: Stores, clock: Any) -> None:
    """After a jump back, sessions keep the ends in their ids; after a jump forward, those that are over expire."""
    store = new_store(ttl_s=100, max_sessions=3)
    first = opened(store, 100)
    clock.advance(-3600)
    second = opened(store, 100)
    store.expire()
    assert get(store, first) is first
    clock.advance(101)
    store.expire()

    with pytest.raises(SessionExpired):
        get(store, second)
    assert get(store, first) is first
    clock.advance(7200)
    store.expire()
    assert len(store) == 0


def test_texts_of_all_sessions_are_bounded_by_evicting_idle_ones(new_store: Stores) -> None:
    """With a journal the session that was used least recently makes room, also while another one is being read."""
    store = new_store(is_durable=True, max_total_history_chars=100)
    first, second, third = opened(store), opened(store), opened(store)
    for session in (first, second, third):
        store.add_chars(session, 30)
        store.unhold(store.hold(session.id.text, Caller("e", "p")))

    store.check_chars(10)
    assert (store.counters.get("sessions_evicted"), store.num_chars) == (0, 90)
    store.check_chars(11)
    assert (store.session_ids(), store.num_chars) == ([second.id.text, third.id.text], 60)
    store.add_chars(third, 50)

    assert (store.session_ids(), store.num_chars) == ([third.id.text], 80)
    store.check_integrity()


def test_without_a_journal_texts_beyond_the_bound_are_refused(new_store: Stores, clock: Any) -> None:
    """The error says when the first session ends; an ended session's texts no longer count."""
    store = new_store(max_total_history_chars=100)
    first, second = opened(store, 10), opened(store, 50)
    store.add_chars(first, 60)
    store.add_chars(second, 30)

    with pytest.raises(Overloaded, match="have 90 characters, and may have 100: the first one expires in 10 s") as full:
        store.check_chars(11)
    assert full.value.retry_after_s == 10
    clock.advance(10)
    store.check_chars(70)
    store.close(second)
    store.add_chars(second, 5)

    assert store.num_chars == 0
    store.check_integrity()
