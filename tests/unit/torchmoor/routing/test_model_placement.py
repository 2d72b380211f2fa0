"""Routing of requests for one of many models."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.torchmoor.routing.candidates import FakeCandidate, change, named, pool_of
from torchmoor.proxy.routing.model_placement import ModelPlacement
from torchmoor.proxy.routing.pool import Pool
from torchmoor.proxy.routing.reasons import (
    MODEL_COLD,
    MODEL_COPY,
    MODEL_LOADING,
    MODEL_RESIDENT,
    MODEL_UNPACKED,
)
from torchmoor.proxy.routing.reported_status import ModelReport, ReportedTier

HOT = 3


@pytest.fixture
def placement() -> ModelPlacement:
    return ModelPlacement(hot_outstanding=HOT, max_models=100)


def hold(placement: ModelPlacement, name: str, *, used: int = 0, most: int = 0, **tiers: ReportedTier) -> None:
    """Report that an instance holds exactly these models."""
    placement.report(name, ModelReport(tiers, used, most), placement.mark())


def sent_to(
    placement: ModelPlacement, pool: Pool[FakeCandidate], model: str, *, excluded: str = ""
) -> tuple[str, str] | None:
    """Send a request; return the chosen instance and the reason."""
    pick = placement.choose(model, pool, frozenset(excluded.split()))
    if pick is None:
        return None
    placement.begin(model, pick.instance.name)
    change(pool, pick.instance, outstanding=pick.instance.outstanding + 1)
    return pick.instance.name, pick.reason


def test_holder_is_preferred_by_tier(placement: ModelPlacement) -> None:
    """A holder in device memory comes before one in host memory, then disk, then none."""
    pool = pool_of(*named(4))
    hold(placement, "i2", m=ReportedTier.DISK)
    assert sent_to(placement, pool, "m") == ("i2", MODEL_UNPACKED)
    placement.failed("m", "i2")
    hold(placement, "i1", m=ReportedTier.HOST)
    assert sent_to(placement, pool, "m") == ("i1", MODEL_RESIDENT)
    hold(placement, "i3", m=ReportedTier.DEVICE)
    assert sent_to(placement, pool, "m") == ("i3", MODEL_RESIDENT)


def test_burst_for_a_cold_model_makes_one_load(placement: ModelPlacement) -> None:
    """The first request for a cold model is noted and the others follow it, however many they are."""
    pool = pool_of(*(FakeCandidate(f"i{index}", capacity=100) for index in range(8)))
    first = sent_to(placement, pool, "m")

    others = {sent_to(placement, pool, "m") for _ in range(20)}

    assert (first[1], others) == (MODEL_COLD, {(first[0], MODEL_LOADING)})


def test_hot_holder_gets_one_copy_at_a_time(placement: ModelPlacement) -> None:
    """During a copy's load requests stay with the holder; then they spread, and another copy may start."""
    pool = pool_of(*(FakeCandidate(f"i{index}", capacity=100) for index in range(4)))
    hold(placement, "i0", m=ReportedTier.DEVICE)
    assert [sent_to(placement, pool, "m") for _ in range(HOT)] == [("i0", MODEL_RESIDENT)] * HOT

    copy = sent_to(placement, pool, "m")
    assert copy[0] != "i0"
    assert copy[1] == MODEL_COPY
    assert {sent_to(placement, pool, "m") for _ in range(5)} == {("i0", MODEL_RESIDENT)}

    placement.loaded("m", copy[0])
    assert [sent_to(placement, pool, "m") for _ in range(HOT - 1)] == [(copy[0], MODEL_RESIDENT)] * (HOT - 1)
    third = sent_to(placement, pool, "m")
    assert third[0] not in ("i0", copy[0])
    assert third[1] == MODEL_COPY


def test_model_that_everybody_holds_goes_to_the_least_busy(placement: ModelPlacement) -> None:
    """If all instances hold a model, requests go to the least busy one."""
    pool = pool_of(*(FakeCandidate(f"i{index}", capacity=100) for index in range(20)))
    for index in range(20):
        hold(placement, f"i{index}", m=ReportedTier.DEVICE)

    sent = [sent_to(placement, pool, "m") for _ in range(40)]

    assert sorted(sent, key=str) == sorted([(f"i{n}", MODEL_RESIDENT) for n in range(20)] * 2, key=str)


def test_copy_goes_only_where_there_is_less_to_do(placement: ModelPlacement) -> None:
    """Without a less busy instance no copy is made, because its load would gain nothing."""
    pool = pool_of(FakeCandidate("i0", capacity=100), FakeCandidate("i1", outstanding=50, capacity=100))
    hold(placement, "i0", m=ReportedTier.DEVICE)

    assert {sent_to(placement, pool, "m") for _ in range(3 * HOT)} == {("i0", MODEL_RESIDENT)}


def test_full_holder_is_passed_by(placement: ModelPlacement) -> None:
    """An instance at its capacity is not chosen; if all are full, the result is None."""
    pool = pool_of(FakeCandidate("i0", outstanding=4, capacity=4), FakeCandidate("i1", capacity=1))
    hold(placement, "i0", m=ReportedTier.DEVICE)

    assert sent_to(placement, pool, "m") == ("i1", MODEL_COPY)
    assert sent_to(placement, pool, "m") is None


def test_refusing_instance_is_passed_by(placement: ModelPlacement) -> None:
    """An instance without room for the model is not tried again for this request or the next."""
    pool = pool_of(*named(2))
    first = sent_to(placement, pool, "m")
    placement.failed("m", first[0])

    second = sent_to(placement, pool, "m", excluded=first[0])

    assert second[0] != first[0]
    assert second[1] == MODEL_COLD
    placement.loaded("m", second[0])
    assert sent_to(placement, pool, "m") == (second[0], MODEL_RESIDENT)


def test_instance_that_is_not_ready_holds_nothing(placement: ModelPlacement) -> None:
    """The models of an unready instance go elsewhere, and count again when it is back with its memory."""
    one, other = named(2)
    pool = pool_of(one, other)
    hold(placement, "i0", m=ReportedTier.DEVICE)
    change(pool, one, is_ready=False)

    assert sent_to(placement, pool, "m") == ("i1", MODEL_COLD)

    change(pool, one, is_ready=True)
    assert sent_to(placement, pool, "m") == ("i0", MODEL_RESIDENT)


def test_cold_models_spread_over_idle_instances_and_stay_put(placement: ModelPlacement) -> None:
    """Rendezvous hashing gives idle instances equal shares of cold models, and the same one after an eviction."""
    pool = pool_of(*named(4))
    homes = {f"m{n}": placement.choose(f"m{n}", pool) for n in range(400)}
    counts = [sum(pick is not None and pick.instance.name == f"i{i}" for pick in homes.values()) for i in range(4)]
    gone = pool.find("i3")
    assert gone is not None
    pool.remove(gone)

    moved = [m for m, pick in homes.items() if pick is not None and placement.choose(m, pool) != pick]

    assert min(counts) > 60
    assert all(pick is not None and pick.instance is gone for m in moved if (pick := homes[m]))


def test_cold_model_goes_where_memory_is_free(placement: ModelPlacement) -> None:
    """Of equally busy instances a cold model goes to the one with most free memory, minus models that are loading."""
    pool = pool_of(*named(2))
    hold(placement, "i0", used=90, most=100, a=ReportedTier.DEVICE)
    hold(placement, "i1", used=40, most=100, b=ReportedTier.DEVICE, c=ReportedTier.DEVICE)
    assert {pick.instance.name for n in range(20) if (pick := placement.choose(f"m{n}", pool))} == {"i1"}

    placement.begin("x", "i1")
    placement.begin("y", "i1")
    placement.begin("z", "i1")

    assert {pick.instance.name for n in range(40) if (pick := placement.choose(f"m{n}", pool))} == {"i0", "i1"}


def test_busy_instance_gets_no_cold_model_although_it_has_it_on_disk(placement: ModelPlacement) -> None:
    """A busy instance does not get a cold model that it has on disk, since that load is not quick enough."""
    pool = pool_of(FakeCandidate("i0", outstanding=3, capacity=100), FakeCandidate("i1", capacity=100))
    hold(placement, "i0", m=ReportedTier.DISK)
    assert placement.choose("m", pool) == (pool.find("i0"), MODEL_UNPACKED)

    busy = pool.find("i0")
    assert busy is not None
    change(pool, busy, outstanding=60)

    assert placement.choose("m", pool) == (pool.find("i1"), MODEL_COLD)


def test_report_without_a_model_forgets_it(placement: ModelPlacement) -> None:
    """A model that the report lacks was evicted and is forgotten."""
    pool = pool_of(*named(3))
    hold(placement, "i0", m=ReportedTier.DEVICE)
    hold(placement, "i0")

    assert not placement.is_held("m", "i0")
    pick = placement.choose("m", pool)
    assert pick.reason == MODEL_COLD


def test_note_outlives_a_report_that_was_asked_for_before_it(placement: ModelPlacement) -> None:
    """A note of a load survives reports requested before it or during its request.

    Later ones remove it if they lack it.
    """
    pool = pool_of(*named(3))
    mark = placement.mark()
    sent = sent_to(placement, pool, "m")
    placement.report(sent[0], ModelReport({}), mark)
    assert sent_to(placement, pool, "m") == (sent[0], MODEL_LOADING)
    hold(placement, sent[0])
    assert sent_to(placement, pool, "m") == (sent[0], MODEL_LOADING)

    for _ in range(3):
        placement.end("m", sent[0])
    assert placement.is_expecting(sent[0])
    hold(placement, sent[0])

    assert not placement.is_expecting(sent[0])
    pick = placement.choose("m", pool)
    assert pick.reason == MODEL_COLD


def test_answer_outlives_a_report_that_was_asked_for_before_it(placement: ModelPlacement) -> None:
    """A model with a later answer stays, although a report requested during its load lacks it."""
    pool = pool_of(*named(3))
    sent = sent_to(placement, pool, "m")
    mark = placement.mark()
    placement.loaded("m", sent[0])
    placement.report(sent[0], ModelReport({"m": ReportedTier.LOADING}), mark)
    assert sent_to(placement, pool, "m") == (sent[0], MODEL_RESIDENT)

    hold(placement, sent[0], m=ReportedTier.LOADING)  # requested afterwards: it was evicted and is loaded again
    assert sent_to(placement, pool, "m") == (sent[0], MODEL_LOADING)
    placement.check_integrity()


def test_restarted_instance_is_forgotten(placement: ModelPlacement) -> None:
    """A restarted instance loses its models and loads in progress; requests that ran there still end."""
    pool = pool_of(*named(2))
    hold(placement, "i0", m=ReportedTier.DEVICE)
    placement.begin("m", "i0")
    placement.begin("n", "i0")

    placement.forget("i0")

    assert [placement.choose(m, pool, frozenset()).reason for m in "mn"] == [MODEL_COLD, MODEL_COLD]
    placement.end("m", "i0")
    placement.end("n", "i0")
    placement.check_integrity()
    assert placement.num_outstanding == 0


def test_without_cache_nothing_is_held_after_its_last_request() -> None:
    """With ModelCacheSetting=Disabled concurrent requests share a load, and a later one needs another."""
    placement = ModelPlacement(hot_outstanding=HOT, max_models=100, is_cached=False)
    pool = pool_of(*(FakeCandidate(f"i{index}", capacity=100) for index in range(4)))
    first = sent_to(placement, pool, "m")
    assert sent_to(placement, pool, "m") == (first[0], MODEL_LOADING)
    placement.loaded("m", first[0])
    placement.end("m", first[0])
    assert sent_to(placement, pool, "m") == (first[0], MODEL_LOADING)
    placement.end("m", first[0])
    placement.end("m", first[0])

    assert not placement.is_expecting(first[0])


def test_what_is_remembered_is_bounded() -> None:
    """The number of models per report and of notes is bounded, whatever names clients send."""
    placement = ModelPlacement(hot_outstanding=HOT, max_models=10)
    placement.report("i0", ModelReport({f"m{n}": ReportedTier.DEVICE for n in range(1000)}), placement.mark())
    for number in range(5000):
        placement.begin(f"made-up-{number}", "i0")
        placement.end(f"made-up-{number}", "i0")

    placement.check_integrity()
    assert sum(placement.is_held(f"m{n}", "i0") for n in range(1000)) == 10
    for number in range(5000):
        placement.loaded(f"made-up-{number}", "i0")  # if it was still noted
    assert sum(placement.is_held(f"made-up-{number}", "i0") for number in range(5000)) == 4096


class PlacementMachine(RuleBasedStateMachine):
    """Requests, reports and restarts in any order."""

    names = st.sampled_from([f"i{index}" for index in range(3)])
    models = st.sampled_from(["m", "n", "o", "p"])

    def __init__(self) -> None:
        super().__init__()
        self.placement = ModelPlacement(hot_outstanding=2, max_models=3)
        self.pool = pool_of(*named(3))
        self.running: list[tuple[str, str]] = []
        self.marks: dict[str, int] = {}

    @rule(model=models, excluded=st.sets(names, max_size=2))
    def send(self, model: str, excluded: set[str]) -> None:
        """Send a request to an open instance that is not excluded, if there is one."""
        pick = self.placement.choose(model, self.pool, frozenset(excluded))
        free = [i for i in self.pool.open_instances if i.name not in excluded]
        assert (pick is None) == (not free)
        if pick is not None:
            assert pick.instance in free
            change(self.pool, pick.instance, outstanding=pick.instance.outstanding + 1)
            self.placement.begin(model, pick.instance.name)
            self.running.append((model, pick.instance.name))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), end=st.sampled_from(["loaded", "failed", "lost"]))
    def answer(self, data: st.DataObject, end: str) -> None:
        """End a request with any result."""
        model, name = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if end != "lost":
            getattr(self.placement, end)(model, name)
        self.placement.end(model, name)
        instance = self.pool.find(name)
        change(self.pool, instance, outstanding=instance.outstanding - 1)

    @rule(name=names)
    def ask(self, name: str) -> None:
        """Request a report."""
        self.marks[name] = self.placement.mark()

    @rule(name=names, tiers=st.dictionaries(models, st.sampled_from(list(ReportedTier)), max_size=4))
    def report(self, name: str, tiers: dict[str, ReportedTier]) -> None:
        """Deliver a report."""
        if name in self.marks:
            self.placement.report(name, ModelReport(tiers, 5, 10), self.marks.pop(name))

    @rule(name=names)
    def restart(self, name: str) -> None:
        """Restart an instance, which loses its memory."""
        self.placement.forget(name)

    @rule(name=names, is_ready=st.booleans())
    def ready(self, name: str, is_ready: bool) -> None:
        """Change an instance's readiness."""
        instance = self.pool.find(name)
        assert instance is not None
        change(self.pool, instance, is_ready=is_ready)

    @invariant()
    def holds(self) -> None:
        """Check that both directions of the index agree and every request is counted once."""
        self.placement.check_integrity()
        assert self.placement.num_outstanding == len(self.running)


TestPlacementMachine = PlacementMachine.TestCase
TestPlacementMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
