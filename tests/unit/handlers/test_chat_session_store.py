"""The session store: lives, budget, demotion, turns."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from handlers.chat.session_id import SessionIds
from handlers.chat.sessions import Session, SessionImage, SessionStore
from handlers.engine.kv_cache import CacheShape, SequenceCache
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
from handlers.settings import SessionSettings

SHAPE = CacheShape(2, 1, 4, torch.float32, torch.device("cpu"))
BLOCK_BYTES = SHAPE.num_bytes(1)
IMAGE_BYTES = 3 * 8 * 8 * 4 + 5 * 4 * 4
IDS = SessionIds({"k0": b"k" * 32}, "local")


class FakeTurn:
    """A turn as the store sees it: it can be told to stop."""

    def __init__(self) -> None:
        self.stopped_by: HandlerError | None = None

    def stop(self, error: HandlerError) -> None:
        self.stopped_by = error


class Stores:
    """Makes stores that are audited at the end of the test."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.made: list[SessionStore] = []

    def __call__(self, **settings: Any) -> SessionStore:
        values = {"budget_bytes": 1 << 20, "ttl_s": 100, "tombstone_s": 3600, **settings}
        store = SessionStore(SessionSettings(**values), IDS, self.clock)
        self.made.append(store)
        return store


@pytest.fixture
def new_store(clock: Any) -> Iterator[Stores]:
    stores = Stores(clock)
    yield stores
    for store in stores.made:
        store.check_integrity()


def opened(store: SessionStore, ttl_s: float = 100) -> Session:
    return store.open(SequenceCache(SHAPE), ttl_s, "e", "p")


def get(store: SessionStore, session: Session) -> Session:
    return store.get(session.id.text, "e", "p")


def image(key: int = -1) -> SessionImage:
    return SessionImage(key, f"{key}", torch.zeros(1, 3, 8, 8), torch.zeros(5, 4))


def run_turn(store: SessionStore, session: Session, num_tokens: int) -> None:
    """A turn from beginning to end that leaves this many positions in the cache."""
    turn: Any = FakeTurn()
    assert store.enqueue(session, turn)
    store.reserve(session, num_tokens)
    session.cache.truncate(0)
    session.cache.advance(list(range(num_tokens)))
    assert store.dequeue(session, turn) is None


def test_open_session_is_found(new_store: Stores) -> None:
    """An id leads to its session, for the same endpoint and caller only."""
    store = new_store()
    session = opened(store)

    assert get(store, session) is session
    assert store.session_ids() == [session.id.text]
    with pytest.raises(SessionUnknown):
        store.get(session.id.text, "e", "other")


def test_expiry_is_absolute(new_store: Stores, clock: Any) -> None:
    """Use does not prolong a session; at its expiry it is gone and its memory is free."""
    store = new_store()
    session = opened(store, 100)
    store.add_images(session, [image()])

    clock.advance(99)
    assert get(store, session) is session
    clock.advance(1)
    with pytest.raises(SessionExpired):
        get(store, session)

    assert len(store) == 0
    assert store.used_bytes == 0


def test_expired_sessions_go_without_being_asked_for(new_store: Stores, clock: Any) -> None:
    """The janitor's call frees what nobody comes back for."""
    store = new_store()
    session = opened(store, 100)
    run_turn(store, session, 10)
    keep = opened(store, 200)

    clock.advance(100)
    store.expire()

    assert store.session_ids() == [keep.id.text]
    assert store.used_bytes == 0


def test_closed_and_expired_differ_and_are_forgotten(new_store: Stores, clock: Any) -> None:
    """For tombstone_s the store knows why a session is gone; afterwards its id is unknown."""
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
    assert not store._tombstones


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
    """A real id that has not expired and that nobody holds is told apart from a forged one."""
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
    """What was never minted is 404, not 410."""
    with pytest.raises(SessionUnknown) as caught:
        new_store().get(text, "e", "p")

    assert caught.value.status == 404


def test_each_end_has_its_own_code_and_message(new_store: Stores, clock: Any) -> None:
    """Unknown, expired, closed and lost read differently."""
    store = new_store()
    closed, expired = opened(store), opened(store, 1)
    lost = opened(new_store())
    store.close(closed)
    clock.advance(1)

    said = set()
    for text in ("x", closed.id.text, expired.id.text, lost.id.text):
        with pytest.raises(HandlerError) as caught:
            store.get(text, "e", "p")
        said.add((caught.value.code, caught.value.status, caught.value.message))

    assert {(code, status) for code, status, _ in said} == {
        ("SessionUnknown", 404),
        ("SessionClosed", 410),
        ("SessionExpired", 410),
        ("SessionLost", 410),
    }
    assert len({message for *_, message in said}) == 4


def test_tombstones_are_bounded(new_store: Stores) -> None:
    """The oldest ends are forgotten first when there are too many."""
    store = new_store(max_tombstones=3)
    sessions = [opened(store) for _ in range(5)]
    for session in sessions:
        store.close(session)

    store.expire()

    assert list(store._tombstones) == [s.id.text for s in sessions[2:]]


def test_closing_twice_is_harmless(new_store: Stores) -> None:
    """The second close of two at once changes nothing."""
    store = new_store()
    session = opened(store)

    store.close(session)
    store.close(session)

    assert len(store) == 0


def test_sessions_are_limited(new_store: Stores, clock: Any) -> None:
    """One more than max_sessions is Overloaded until one has ended, by expiry too."""
    store = new_store(max_sessions=2)
    opened(store, 10)
    opened(store, 20)

    with pytest.raises(Overloaded) as caught:
        opened(store)
    clock.advance(10)
    opened(store)

    assert caught.value.retry_after_s is not None
    assert len(store) == 2


def test_bytes_are_those_of_the_tensors(new_store: Stores) -> None:
    """used_bytes is the formula's sum of pixels, features and cache blocks."""
    store = new_store()
    session = opened(store)

    store.add_images(session, [image(-1), image(-2)])
    assert store.used_bytes == 2 * IMAGE_BYTES
    run_turn(store, session, 65)
    assert store.used_bytes == 2 * IMAGE_BYTES + 2 * BLOCK_BYTES
    store.close(session)
    assert store.used_bytes == 0


def test_end_of_a_turn_gives_back_what_it_did_not_use(new_store: Stores) -> None:
    """A turn that reserved room for a long answer keeps the blocks of its real length only."""
    store = new_store()
    session = opened(store)
    turn: Any = FakeTurn()
    store.enqueue(session, turn)
    store.reserve(session, 1000)
    assert store.used_bytes == SHAPE.num_bytes(1000)

    session.cache.advance([1, 2, 3])
    store.dequeue(session, turn)

    assert store.used_bytes == BLOCK_BYTES
    assert session.cache.tokens == [1, 2, 3]


def test_failed_trim_keeps_the_larger_cache(new_store: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without room for the smaller copy must not leave the session pinned for ever."""
    store = new_store()
    session = opened(store)
    turn: Any = FakeTurn()
    store.enqueue(session, turn)
    store.reserve(session, 1000)

    def no_memory(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        session.cache.advance([1])
        store.dequeue(session, turn)

    assert session.turn is None
    assert store.used_bytes == SHAPE.num_bytes(1000)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate")])
def test_device_without_memory_is_out_of_memory(
    new_store: Stores, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A reservation within the budget that the device cannot keep is a 507, and counts nothing."""
    store = new_store()
    session = opened(store)
    turn: Any = FakeTurn()
    store.enqueue(session, turn)

    def no_memory(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        with pytest.raises(OutOfMemory) as caught:
            store.reserve(session, 10)
    store.dequeue(session, turn)

    assert caught.value.status == 507
    assert store.used_bytes == 0


def test_least_recently_used_idle_sessions_are_demoted_first(new_store: Stores, clock: Any) -> None:
    """Under pressure idle caches go, oldest use first, just as many as are needed; their images stay."""
    store = new_store(budget_bytes=6 * BLOCK_BYTES + 3 * IMAGE_BYTES)
    sessions = [opened(store) for _ in range(3)]
    for i, session in enumerate(sessions):
        store.add_images(session, [image(-1 - i)])
        clock.advance(1)
        run_turn(store, session, 128)
    clock.advance(1)
    get(store, sessions[0])  # used again: now the second is the oldest
    newcomer = opened(store)

    run_turn(store, newcomer, 64)

    assert [s.cache.length for s in sessions] == [128, 0, 128]
    assert all(s.pending_images for s in sessions)
    assert store.num_demoted == 1


def test_pinned_sessions_are_never_demoted(new_store: Stores, clock: Any) -> None:
    """A session with a turn keeps its cache, even if it is the oldest."""
    store = new_store(budget_bytes=3 * BLOCK_BYTES)
    pinned, idle, newcomer = (opened(store) for _ in range(3))
    run_turn(store, pinned, 64)
    clock.advance(1)
    run_turn(store, idle, 64)
    turn: Any = FakeTurn()
    store.enqueue(pinned, turn)

    run_turn(store, newcomer, 128)

    assert pinned.cache.length == 64
    assert idle.cache.length == 0
    store.dequeue(pinned, turn)


def test_out_of_memory_changes_nothing(new_store: Stores) -> None:
    """What cannot fit even without the idle caches is refused before any of them is given up."""
    store = new_store(budget_bytes=3 * BLOCK_BYTES)
    idle, asking = opened(store), opened(store)
    run_turn(store, idle, 64)
    run_turn(store, asking, 64)
    turn: Any = FakeTurn()
    store.enqueue(asking, turn)

    with pytest.raises(OutOfMemory):
        store.reserve(asking, 64 * 4)

    assert (idle.cache.length, asking.cache.length) == (64, 64)
    assert store.used_bytes == 2 * BLOCK_BYTES
    assert store.num_demoted == 0
    store.dequeue(asking, turn)


def test_image_that_does_not_fit_is_refused(new_store: Stores) -> None:
    """The budget holds for images too, and a refused one leaves no trace."""
    store = new_store(budget_bytes=IMAGE_BYTES)
    session = opened(store)
    store.add_images(session, [image(-1)])

    with pytest.raises(OutOfMemory):
        store.add_images(session, [image(-2)])

    assert [i.key for i in session.pending_images] == [-1]
    assert store.used_bytes == IMAGE_BYTES


def test_images_of_a_session_are_limited(new_store: Stores) -> None:
    """Images of earlier questions count as well as those that wait for the next one."""
    store = new_store(max_images=2)
    session = opened(store)
    first = image(-1)
    store.add_images(session, [first])
    store.commit(session, [], [first])

    with pytest.raises(InvalidRequest):
        store.add_images(session, [image(-2), image(-3)])
    store.add_images(session, [image(-2)])

    assert len(session.images) + len(session.pending_images) == 2


def test_images_added_while_a_turn_runs_wait_for_the_next_question(new_store: Stores) -> None:
    """A turn takes the images that were there when it began; later ones stay pending through its commit."""
    store = new_store()
    session = opened(store)
    mine, later = image(-1), image(-2)
    turn: Any = FakeTurn()
    store.enqueue(session, turn)
    store.add_images(session, [mine])

    store.add_images(session, [later])
    store.commit(session, [{"role": "user"}], [mine])
    store.dequeue(session, turn)

    assert session.images == [mine]
    assert session.pending_images == [later]
    assert store.used_bytes == 2 * IMAGE_BYTES


def test_what_is_committed_is_counted_unless_the_session_is_over(new_store: Stores) -> None:
    """Another request may bring a session up to date while its turn fails, or just after its end."""
    store = new_store()
    session, ended = opened(store), opened(store)

    store.commit(session, [{"role": "user"}], [image()])
    store.close(ended)
    store.commit(ended, [{"role": "user"}], [image()])

    assert store.used_bytes == IMAGE_BYTES
    assert ended.images == []


def test_images_of_a_failed_question_are_dropped(new_store: Stores) -> None:
    """Only those that came with the question go, and their bytes with them; equal ones of others stay."""
    store = new_store()
    session = opened(store)
    early, mine = image(-1), image(-1)
    store.add_images(session, [early])
    store.add_images(session, [mine])

    store.drop_images(session, [mine])

    assert session.pending_images == [early]
    assert store.used_bytes == IMAGE_BYTES


def test_turns_wait_in_order(new_store: Stores) -> None:
    """One turn at a time; the end of one hands the session to the one that came first."""
    store = new_store()
    session = opened(store)
    first, second, third = (FakeTurn() for _ in range(3))
    turns: list[Any] = [first, second, third]

    assert [store.enqueue(session, turn) for turn in turns] == [True, False, False]
    assert store.dequeue(session, turns[0]) is second
    assert store.dequeue(session, turns[1]) is third
    assert store.dequeue(session, turns[2]) is None
    assert session.turn is None


def test_waiting_turns_are_bounded(new_store: Stores) -> None:
    """Past max_waiting_turns a question is Overloaded, until one has left the queue."""
    store = new_store(max_waiting_turns=2)
    session = opened(store)
    turns: list[Any] = [FakeTurn() for _ in range(4)]
    for turn in turns[:3]:
        store.enqueue(session, turn)

    with pytest.raises(Overloaded):
        store.enqueue(session, turns[3])
    assert store.dequeue(session, turns[1]) is None
    assert store.enqueue(session, turns[3]) is False

    assert store.dequeue(session, turns[0]) is turns[2]
    assert store.dequeue(session, turns[2]) is turns[3]
    assert store.dequeue(session, turns[3]) is None


def test_dequeue_of_a_turn_that_is_over_does_nothing(new_store: Stores) -> None:
    """A second end of one turn must not end its successor."""
    store = new_store()
    session = opened(store)
    first, second = FakeTurn(), FakeTurn()
    turns: list[Any] = [first, second]
    for turn in turns:
        store.enqueue(session, turn)

    store.dequeue(session, turns[0])
    assert store.dequeue(session, turns[0]) is None

    assert session.turn is second
    store.dequeue(session, turns[1])


def test_close_stops_the_running_turn_and_frees_the_memory_after_it(new_store: Stores) -> None:
    """A close is felt at once by the turn; tensors go, and are counted, until the turn lets go of them."""
    store = new_store()
    session = opened(store)
    store.add_images(session, [image()])
    turn = FakeTurn()
    running: Any = turn
    store.enqueue(session, running)
    store.reserve(session, 64)

    store.close(session)

    assert isinstance(turn.stopped_by, SessionClosed)
    assert len(store) == 0
    assert store.used_bytes == IMAGE_BYTES + BLOCK_BYTES
    store.check_integrity()
    store.dequeue(session, running)
    assert store.used_bytes == 0


def test_expiry_lets_the_running_turn_finish(new_store: Stores, clock: Any) -> None:
    """Nobody can join an expired session, but the answer that is under way is not cut."""
    store = new_store()
    session = opened(store, 10)
    turn = FakeTurn()
    running: Any = turn
    store.enqueue(session, running)
    store.reserve(session, 64)

    clock.advance(10)
    store.expire()

    assert turn.stopped_by is None
    with pytest.raises(SessionExpired):
        get(store, session)
    other: Any = FakeTurn()
    with pytest.raises(SessionExpired):
        store.enqueue(session, other)
    assert store.used_bytes == BLOCK_BYTES
    store.dequeue(session, running)
    assert store.used_bytes == 0


def test_ended_session_hands_itself_to_waiting_turns_until_none_is_left(new_store: Stores) -> None:
    """Turns that wait when the session ends come up one by one, so that each can be told; then the memory goes."""
    store = new_store()
    session = opened(store)
    first, second = FakeTurn(), FakeTurn()
    turns: list[Any] = [first, second]
    for turn in turns:
        store.enqueue(session, turn)
    store.reserve(session, 64)

    store.close(session)
    assert store.dequeue(session, turns[0]) is second
    store.check_integrity()
    assert store.dequeue(session, turns[1]) is None

    assert store.used_bytes == 0
    assert not store._ending


def test_ended_session_takes_no_images(new_store: Stores) -> None:
    """An image that was loaded while its session ended is refused, not leaked."""
    store = new_store()
    session = opened(store)
    store.close(session)

    with pytest.raises(SessionClosed):
        store.add_images(session, [image()])

    assert store.used_bytes == 0


def test_discarded_opening_leaves_no_trace(new_store: Stores) -> None:
    """A session whose id nobody was told is not remembered as closed."""
    store = new_store()
    session = opened(store)
    store.add_images(session, [image()])

    store.discard(session)

    assert len(store) == 0
    assert store.used_bytes == 0
    assert not store._tombstones


def test_audit_finds_bytes_that_nobody_counted(clock: Any) -> None:
    """check_integrity compares the count with the tensors."""
    store = SessionStore(SessionSettings(), IDS, clock)
    session = opened(store)
    session.pending_images.append(image())

    with pytest.raises(RuntimeError, match="counts 0 bytes"):
        store.check_integrity()


def test_audit_finds_a_broken_budget(clock: Any) -> None:
    """check_integrity compares the count with the budget."""
    store = SessionStore(SessionSettings(budget_bytes=1), IDS, clock)
    session = opened(store)
    session.pending_images.append(image())
    store._account(session)

    with pytest.raises(RuntimeError, match="budget"):
        store.check_integrity()


def test_repr_tells_the_state(new_store: Stores) -> None:
    """Logs show whether a session is idle, pinned or ended."""
    store = new_store()
    session = opened(store)
    turn: Any = FakeTurn()

    seen = [repr(session)]
    store.enqueue(session, turn)
    seen.append(repr(session))
    store.close(session)
    seen.append(repr(session))
    store.dequeue(session, turn)

    assert [word in text for word, text in zip(("idle", "pinned", "ended"), seen, strict=True)] == [True] * 3
