"""The model cache's bookkeeping in any order of events, without threads, a clock or models."""

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from handlers.errors import (
    HandlerError,
    InternalError,
    LoadStopped,
    ModelBroken,
    ModelLoading,
    ModelUnknown,
    OutOfMemory,
    Overloaded,
)
from handlers.many.model import ModelLease, ModelTier
from handlers.many.residency.cache import ModelCache
from handlers.many.residency.model_entries import LoaderStep, ModelEntry, ModelState, ModelTicket
from handlers.settings.many import ManySettings

NAMES = ("a", "b", "c", "d")


class FakeLoaded:
    """A fake model that records its place and whether it was closed."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_on_device = True
        self.num_closed = 0

    @property
    def device_bytes(self) -> int:
        return self.num_bytes if self.is_on_device else 0

    @property
    def host_bytes(self) -> int:
        return 0 if self.is_on_device else self.num_bytes

    mapped_bytes = 0


class FakeDiskLease:
    def __init__(self, version: str) -> None:
        self.version = version
        self.folder = Path()
        self.is_new = version == "v1"
        self.num_released = 0

    def release(self) -> None:
        self.num_released += 1


class Bench:
    """A cache, its pending work, and the results that its clients received."""

    def __init__(self, device: int, host: int, *, is_unified: bool = False, **limits: Any) -> None:
        self.now = 1000.0
        self.settings = ManySettings(host_bytes=host, **limits)
        self.cache = ModelCache(self.settings, device, self._release, is_unified=is_unified, clock=lambda: self.now)
        self.work: list[tuple[LoaderStep, ModelEntry]] = []
        self.models: list[FakeLoaded] = []
        self.disk_leases: list[FakeDiskLease] = []
        self.leases: list[ModelLease] = []
        self.heard: dict[ModelTicket, list[object]] = {}
        self.cancelled: set[ModelTicket] = set()
        self.unloads: list[list[HandlerError | None]] = []
        self.num_versions = 0

    def pump(self) -> None:
        while self.cache.todo:
            todo, self.cache.todo = self.cache.todo, []
            for each in todo:
                if isinstance(each, tuple):
                    self.work.append(each)
                else:
                    each()

    def want(self, name: str, *, is_patient: bool = False) -> ModelTicket:
        heard: list[object] = []

        def ready(lease: ModelLease) -> None:
            heard.append(lease)
            self.leases.append(lease)

        until = math.inf if is_patient else self.now + self.settings.hold_s
        ticket = ModelTicket(ready, heard.append, until)
        self.heard[ticket] = heard
        self.cache.want(ticket, name, self.now)
        self.pump()
        return ticket

    def cancel(self, ticket: ModelTicket) -> None:
        self.cancelled.add(ticket)
        self.cache.cancel(ticket)
        self.pump()

    def release(self, lease: ModelLease) -> None:
        self.leases.remove(lease)
        lease.release()
        lease.release()

    def _release(self, entry: ModelEntry) -> None:
        self.cache.release(entry, self.now)
        self.pump()

    def unload(self, name: str) -> list[HandlerError | None]:
        done: list[HandlerError | None] = []
        self.cache.retire(name, done.append, self.now)
        self.unloads.append(done)
        self.pump()
        return done

    def finish(self, index: int = 0, *, num_bytes: int = 30, error: HandlerError | None = None) -> LoaderStep:
        """Complete one piece of pending work, with success or an error."""
        work, entry = self.work.pop(index % len(self.work))
        cache = self.cache
        if work is LoaderStep.FETCH and not cache.begin_fetch(entry, self.now):
            pass
        elif work is LoaderStep.CLOSE:
            assert entry.model is not None
            model = entry.model
            assert entry.num_leases == 0
            assert model.num_closed == 0
            model.num_closed += 1
            entry.model = None
            cache.closed(entry, self.now)
        elif error is not None:
            cache.failed(entry, error, self.now)
        elif work is LoaderStep.FETCH:
            self.num_versions += 1
            lease = FakeDiskLease(f"v{self.num_versions}")
            self.disk_leases.append(lease)
            cache.fetched(entry, lease, num_bytes, self.now)
        elif work is LoaderStep.LOAD:
            self.models.append(FakeLoaded(num_bytes))
            cache.loaded(entry, self.models[-1], self.now)
        else:
            entry.model.is_on_device = work is LoaderStep.PROMOTE
            (cache.promoted if work is LoaderStep.PROMOTE else cache.demoted)(entry, self.now)
        self.pump()
        return work

    def finish_all(self, num_bytes: int = 30) -> list[LoaderStep]:
        done = []
        while self.work:
            done.append(self.finish(num_bytes=num_bytes))
        return done

    def load(self, name: str, num_bytes: int = 30) -> ModelLease:
        ticket = self.want(name)
        self.finish_all(num_bytes)
        (lease,) = self.heard[ticket]
        return lease

    def tiers(self) -> dict[str, ModelState]:
        return {name: entry.state for name, entry in self.cache.entries.current.items()}

    def check(self) -> None:
        self.cache.check_integrity()
        for lease in self.leases:
            assert lease.model.num_closed == 0
            assert lease.model.is_on_device
        assert all(len(heard) <= 1 for heard in self.heard.values())

    def check_end(self) -> None:
        """Check that all work and all requests are complete, and nothing is left."""
        self.finish_all()
        for lease in list(self.leases):
            self.release(lease)
        self.finish_all()
        self.now += self.settings.hold_s + self.settings.room_timeout_s
        self.cache.tick(self.now)
        self.pump()
        self.finish_all()
        self.check()
        assert all(len(heard) == 1 for ticket, heard in self.heard.items() if ticket not in self.cancelled)
        self.cache.stop(LoadStopped(), self.now)
        self.pump()
        self.finish_all()
        for lease in list(self.leases):
            self.release(lease)
        self.finish_all()
        self.check()
        assert self.cache.entries.current == {}
        assert self.cache.entries.others == set()
        assert (self.cache.budget.device.used_bytes, self.cache.budget.host.used_bytes) == (0, 0)
        assert all(model.num_closed == 1 for model in self.models)
        assert all(lease.num_released == 1 for lease in self.disk_leases)
        assert all(done == [None] for done in self.unloads)


ERRORS = st.sampled_from([ModelBroken("x"), ModelUnknown("x"), OutOfMemory("x"), InternalError("x")])


class CacheMachine(RuleBasedStateMachine):
    """Events in any order, with any result of the work."""

    @initialize(is_unified=st.booleans(), cache=st.sampled_from(["enabled", "enabled", "disabled"]))
    def begin(self, is_unified: bool, cache: str) -> None:
        self.bench = Bench(100, 80, is_unified=is_unified, cache=cache, max_waiting=6, max_loading=3, broken_s=20)

    @rule(name=st.sampled_from(NAMES), is_patient=st.sampled_from([False, False, False, True]))
    def acquire(self, name: str, is_patient: bool) -> None:
        self.bench.want(name, is_patient=is_patient)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = [ticket for ticket, heard in self.bench.heard.items() if not heard]
        if waiting:
            self.bench.cancel(data.draw(st.sampled_from(waiting)))

    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        if self.bench.leases:
            self.bench.release(self.bench.leases[index % len(self.bench.leases)])

    @rule(name=st.sampled_from(NAMES), num_bytes=st.integers(20, 60))
    def use(self, name: str, num_bytes: int) -> None:
        """A request up to its lease."""
        self.bench.want(name)
        self.bench.finish_all(num_bytes)

    @rule(index=st.integers(0, 20), num_bytes=st.integers(1, 120))
    def finish(self, index: int, num_bytes: int) -> None:
        if self.bench.work:
            self.bench.finish(index, num_bytes=num_bytes)

    @rule(num_bytes=st.integers(1, 60))
    def finish_all(self, num_bytes: int) -> None:
        self.bench.finish_all(num_bytes)

    @rule(index=st.integers(0, 20), error=ERRORS)
    def fail(self, index: int, error: HandlerError) -> None:
        if self.bench.work:
            self.bench.finish(index, error=error)

    @rule(name=st.sampled_from(NAMES))
    def pin(self, name: str) -> None:
        self.bench.cache.entries.pinned.add(name)
        self.bench.want(name, is_patient=True)

    @rule(name=st.sampled_from(NAMES))
    def unpin(self, name: str) -> None:
        self.bench.cache.unpin(name, self.bench.now)
        self.bench.pump()

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        if name in self.bench.cache.entries.current:
            self.bench.unload(name)

    @rule(seconds=st.sampled_from([1, 10, 31, 60]))
    def let_time_pass(self, seconds: float) -> None:
        self.bench.now += seconds
        self.bench.cache.tick(self.bench.now)
        self.bench.pump()

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check_end()


TestCache = CacheMachine.TestCase
TestCache.settings = hypothesis_settings(max_examples=60, stateful_step_count=60, deadline=None, derandomize=True)


def test_only_requests_count() -> None:
    """A model that is prewarmed or pinned, but not requested, has no hits, and its load does not count as a miss."""
    bench = Bench(device=100, host=0)

    bench.want("a", is_patient=True)
    bench.finish_all()
    bench.want("a", is_patient=True)

    counters = bench.cache.counters
    assert [counters.get(f"events_{name}") for name in ("hits", "misses", "loads")] == [0, 0, 1]
    assert bench.cache.entries.current["a"].num_hits == 0
    bench.want("a")
    bench.load("b")
    assert [counters.get(f"events_{name}") for name in ("hits", "misses", "loads")] == [1, 1, 2]
    assert [bench.cache.entries.current[name].num_hits for name in ("a", "b")] == [1, 1]


@pytest.mark.parametrize("seed", range(24))
def test_long_random_lives_keep_the_books_right(seed: int) -> None:
    """These runs are longer than hypothesis's examples, so that most of them evict, demote and promote."""
    random = Random(seed)
    bench = Bench(
        100,
        random.choice([50, 80, 150]),
        is_unified=seed % 3 == 0,
        cache="disabled" if seed % 8 == 7 else "enabled",
        max_waiting=8,
        max_loading=4,
        broken_s=20,
    )
    errors = [ModelBroken("x"), ModelUnknown("x"), OutOfMemory("x"), InternalError("x")]
    for _ in range(1000):
        chance = random.random()
        name = random.choice("abcdefg")
        waiting = [ticket for ticket, heard in bench.heard.items() if not heard and ticket not in bench.cancelled]
        if chance < 0.30:
            bench.want(name, is_patient=random.random() < 0.2)
        elif chance < 0.60 and bench.work:
            is_ill = random.random() < 0.1
            error = random.choice(errors) if is_ill else None
            bench.finish(random.randrange(99), num_bytes=random.choice([10, 25, 30, 35, 40, 110]), error=error)
        elif chance < 0.86 and bench.leases:
            bench.release(random.choice(bench.leases))
        elif chance < 0.89 and waiting:
            bench.cancel(random.choice(waiting))
        elif chance < 0.91 and name in bench.cache.entries.current:
            bench.unload(name)
        elif chance < 0.92:
            bench.cache.entries.pinned.add(name)
            bench.want(name, is_patient=True)
        elif chance < 0.96:
            for pinned in list(bench.cache.entries.pinned):
                bench.cache.unpin(pinned, bench.now)
                bench.pump()
        elif chance < 0.98:
            bench.now += random.choice([1, 10, 31])
            bench.cache.tick(bench.now)
            bench.pump()
        bench.check()

    counters = bench.cache.counters
    assert counters.get("events_hits") > 0
    assert counters.get("events_evictions") + counters.get("events_demotions") > 0 or bench.settings.cache == "disabled"
    bench.check_end()


def test_many_who_want_a_model_share_one_load() -> None:
    """Concurrent requests cause one download and one load, and each gets a lease."""
    bench = Bench(100, 0)

    tickets = [bench.want("a") for _ in range(5)]
    done = bench.finish_all()

    assert done == [LoaderStep.FETCH, LoaderStep.LOAD]
    assert len({id(bench.heard[ticket][0].model) for ticket in tickets}) == 1
    bench.check_end()


def test_the_least_recently_used_leaves_the_device_for_the_host_and_then_for_good() -> None:
    """Models move from device to host to disk in the order of their last use."""
    bench = Bench(70, 40)
    for name in ("a", "b"):
        bench.release(bench.load(name))
    bench.release(bench.load("a"))

    bench.release(bench.load("c"))
    first = bench.tiers()
    bench.release(bench.load("d"))

    assert first == {"a": ModelState.READY, "b": ModelState.ON_HOST, "c": ModelState.READY}
    assert bench.tiers() == {"a": ModelState.ON_HOST, "c": ModelState.READY, "d": ModelState.READY}
    assert bench.cache.next_to_go() == ["c", "d"]
    bench.check_end()


def test_an_evicted_model_is_told_as_leaving_while_it_still_takes_memory() -> None:
    """A model that is leaving is not reported as loading, which attracts requests; its bytes count until freed."""
    bench = Bench(50, 0, is_unified=True)
    bench.release(bench.load("a"))

    bench.want("b")
    assert LoaderStep.FETCH is bench.finish()

    (leaving,) = bench.cache.entries.others
    assert (leaving.name, leaving.tier, leaving.device_bytes) == ("a", ModelTier.LEAVING, 30)
    assert LoaderStep.CLOSE is bench.finish()
    assert not bench.cache.entries.others
    bench.finish_all()
    bench.check()


def test_a_model_on_the_host_comes_back_without_being_read_again() -> None:
    """A promotion neither fetches nor loads."""
    bench = Bench(30, 60)
    for name in ("a", "b"):
        bench.release(bench.load(name))

    bench.want("a")

    assert LoaderStep.LOAD not in bench.finish_all()
    assert bench.leases[0].found == "host"
    assert bench.load("a").found == "hit"
    assert bench.tiers() == {"a": ModelState.READY, "b": ModelState.ON_HOST}
    bench.check_end()


def test_a_leased_model_stays_and_the_next_load_waits_for_it() -> None:
    bench = Bench(40, 0)
    lease = bench.load("a")

    ticket = bench.want("b")
    bench.finish_all()
    waits = list(bench.heard[ticket])
    bench.now += 3
    bench.release(lease)
    bench.finish_all()

    (second,) = bench.heard[ticket]
    assert waits == []
    assert (lease.found, second.found, second.load_s) == ("cold", "disk", 3)
    bench.check_end()


def test_a_load_does_not_wait_for_memory_for_ever() -> None:
    """After room_timeout_s a load is refused as out of memory."""
    bench = Bench(40, 0)
    bench.load("a")
    ticket = bench.want("b")
    bench.finish_all()

    bench.now += bench.settings.room_timeout_s
    bench.cache.tick(bench.now)
    bench.pump()

    assert [type(each) for each in bench.heard[ticket]] == [OutOfMemory]
    bench.check_end()


def test_a_model_larger_than_the_budget_is_measured_once_and_then_refused_at_once() -> None:
    """A model that is larger than its files suggest evicts the others once, not again for the second request."""
    bench = Bench(100, 0)
    bench.release(bench.load("a", 60))
    ticket = bench.want("b")
    bench.finish(num_bytes=10)
    bench.finish(num_bytes=130)
    bench.finish_all()
    bench.release(bench.load("a", 60))
    bench.num_versions = 1  # so that b is the same version

    again = bench.want("b")
    done = bench.finish_all()

    assert [type(bench.heard[each][0]) for each in (ticket, again)] == [OutOfMemory, OutOfMemory]
    assert done == [LoaderStep.FETCH]
    assert bench.tiers() == {"a": ModelState.READY}
    bench.check_end()


def test_a_pinned_model_is_never_evicted() -> None:
    """A load that would fit only without a pinned model is refused at once."""
    bench = Bench(50, 50)
    bench.cache.entries.pinned.add("a")
    bench.release(bench.load("a"))

    ticket = bench.want("b")
    bench.finish_all()

    assert [type(each) for each in bench.heard[ticket]] == [OutOfMemory]
    assert bench.tiers() == {"a": ModelState.READY}
    bench.check_end()


def test_a_replaced_model_serves_its_leases_to_the_end_and_new_requests_get_the_new_one() -> None:
    """Both versions stay in memory while the old one has leases."""
    bench = Bench(100, 0)
    old = bench.load("a")
    old_version = bench.cache.entries.current["a"].version

    done = bench.unload("a")
    new = bench.load("a")
    told_early = list(done)
    bench.release(old)
    bench.finish_all()

    assert (old_version, bench.cache.entries.current["a"].version) == ("v1", "v2")
    assert new.model is bench.cache.entries.current["a"].model is not old.model
    assert old.model.num_closed == 1
    assert (told_early, done) == ([], [None])
    bench.check_end()


def test_who_waits_for_a_model_that_is_replaced_on_its_way_to_the_host_gets_it() -> None:
    """A model with waiting requests returns to the device for them before it is dropped."""
    bench = Bench(30, 60)
    bench.release(bench.load("a"))
    bench.want("b")
    bench.finish()
    assert [work for work, _ in bench.work] == [LoaderStep.DEMOTE]

    ticket = bench.want("a")
    bench.unload("a")
    bench.finish_all()
    for lease in list(bench.leases):
        bench.release(lease)
        bench.finish_all()

    assert isinstance(bench.heard[ticket][0], ModelLease)
    assert list(bench.tiers()) == ["b"]
    bench.check_end()


def test_a_broken_model_is_remembered_for_a_while() -> None:
    """A broken model is not read again for each request, and is tried again later."""
    bench = Bench(100, 0, broken_s=60)
    bench.want("a")
    bench.finish(error=ModelBroken("no config.json"))

    again = bench.want("a")
    bench.now += 61
    bench.want("a")

    assert [type(each) for each in bench.heard[again]] == [ModelBroken]
    assert [work for work, _ in bench.work] == [LoaderStep.FETCH]
    bench.check_end()


def test_a_version_that_was_given_up_does_not_condemn_the_next_one() -> None:
    """The old version's failure, after the new version's load has begun, does not affect the new version."""
    bench = Bench(100, 0)
    bench.want("a")
    bench.unload("a")

    during = bench.want("a")
    bench.finish(error=ModelBroken("the old one"))
    after = bench.want("a")
    bench.finish_all()

    assert [type(bench.heard[each][0]) for each in (during, after)] == [ModelLease, ModelLease]
    bench.check_end()


def test_who_waits_too_long_is_told_to_come_back_and_the_load_goes_on() -> None:
    """The request gets 429 with Retry-After; a later one finds the model."""
    bench = Bench(100, 0, hold_s=55)
    ticket = bench.want("a")

    bench.finish()
    bench.now += 55
    bench.cache.tick(bench.now)
    bench.pump()
    bench.finish_all()

    (error,) = bench.heard[ticket]
    assert isinstance(error, ModelLoading)
    assert error.retry_after_s
    assert bench.tiers() == {"a": ModelState.READY}
    bench.check_end()


def test_a_load_that_nobody_waits_for_any_more_is_not_begun() -> None:
    """A load whose clients have all disconnected is not started."""
    bench = Bench(100, 0)
    ticket = bench.want("a")

    bench.cancel(ticket)
    done = bench.finish_all()

    assert done == [LoaderStep.FETCH]
    assert bench.tiers() == {}
    bench.check_end()


def test_waiters_and_loads_are_bounded() -> None:
    """Requests beyond the limits are refused at once."""
    bench = Bench(100, 0, max_waiting=3, max_loading=2)

    bench.want("a")
    bench.want("b")
    many_loads = bench.want("c")
    bench.want("a")
    many_waiters = bench.want("a")

    assert [type(bench.heard[each][0]) for each in (many_loads, many_waiters)] == [Overloaded, Overloaded]
    bench.check_end()


def test_without_a_cache_a_model_goes_with_its_last_request() -> None:
    """With ModelCacheSetting=Disabled a model is loaded, used once and dropped."""
    bench = Bench(100, 100, cache="disabled")
    first, second = bench.want("a"), bench.want("a")
    bench.finish_all()

    bench.release(bench.heard[first][0])
    kept = bench.tiers()
    bench.release(bench.heard[second][0])
    bench.finish_all()

    assert kept == {"a": ModelState.READY}
    assert bench.tiers() == {}
    bench.check_end()


def test_two_models_that_turn_out_too_large_do_not_wait_for_each_other() -> None:
    """Of two models that hold memory and need more, one is dropped and the other continues."""
    bench = Bench(100, 0)
    tickets = [bench.want(name) for name in ("a", "b")]
    for _ in range(2):
        bench.finish(num_bytes=40)

    for _ in range(2):
        bench.finish(num_bytes=70)
    bench.finish_all()

    assert sorted(type(bench.heard[each][0]).__name__ for each in tickets) == ["ModelLease", "OutOfMemory"]
    bench.check_end()


@pytest.mark.parametrize("error", [ModelUnknown("gone"), OutOfMemory("full")])
def test_only_broken_models_are_remembered(error: HandlerError) -> None:
    """Missing models and lack of memory are not remembered, so that the next request tries again."""
    bench = Bench(100, 0)
    bench.want("a")
    bench.finish(error=error)

    ticket = bench.want("a")
    bench.finish_all()

    assert isinstance(bench.heard[ticket][0], ModelLease)
    bench.check_end()
