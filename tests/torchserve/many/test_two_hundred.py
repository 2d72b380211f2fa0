"""More than 200 models in one worker with memory for 20: correct answers, memory, broken models, kill -9."""

import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest
import requests

from tests.memory import PeakMemory, memory_of
from tests.torchserve.many.conftest import MINILM_BYTES, NUM_RESIDENT
from tests.torchserve.many.fleet import FIRST, ManyFleet
from tests.torchserve.many.population import NUM_HALF, Variant, replace_variant
from tests.torchserve.many.reference import TEXTS
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.slow]

NUM_CLIENTS = 6
MISSING = ("nobody.tar.gz", "minilm-999")
SLACK_BYTES = 150_000_000  # memory for running requests, tokenizers and templates; 200 models take 18 GB


@dataclass(frozen=True)
class Visit:
    """A request for a model, valid or not, and its answer."""

    model: Variant | str
    text: int
    answer: requests.Response


@pytest.fixture
def alone(many: ManyFleet) -> Iterator[ManyFleet]:
    """Give all work to one worker without models in memory."""
    with many.only_the_first():
        for model in many.status()["models"]:
            if model["tier"] == "device":
                assert many.operate("models", {"action": "unload", "model": model["name"]}).status_code == 200
        wait_until(lambda: many.status()["budgets"]["device"]["used"] == 0, "no model is in memory")
        yield many


def zipf(models: Sequence[Variant], number: int, seed: int) -> list[Variant]:
    """Return a Zipf distribution: the second model is requested half as often as the first, and so on."""
    return random.Random(seed).choices(models, [1 / rank for rank in range(1, len(models) + 1)], k=number)


def visit_all(many: ManyFleet, models: Sequence[Variant | str]) -> list[Visit]:
    """Request the models from several clients at once; return the answers in order."""
    own = threading.local()

    def visit(number: int) -> Visit:
        if not hasattr(own, "http"):
            own.http = requests.Session()
        model, text = models[number], number % len(TEXTS)
        name = model if isinstance(model, str) else model.name
        return Visit(model, text, many.invoke(name, {"inputs": TEXTS[text]}, own.http))

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        return list(clients.map(visit, range(len(models))))


def find_wrong(many: ManyFleet, visits: Sequence[Visit]) -> list[str]:
    """Return the answers of valid models that are wrong."""
    return [
        f"{visit.model.name} {visit.answer.status_code} {visit.answer.text[:200]}"
        for visit in visits
        if isinstance(visit.model, Variant) and not many.is_right(visit.model, visit.text, visit.answer)
    ]


def test_each_of_two_hundred_models_answers_for_itself_within_the_memory_of_twenty(alone: ManyFleet) -> None:
    """Models that are loaded and evicted repeatedly answer correctly within the memory budget.

    Broken and missing models fail alone with the reason. Both the worker's and the kernel's count of memory stay within
    the budget.
    """
    variants, broken = alone.population.variants, alone.population.broken
    models: list[Variant | str] = [*variants, *zipf(variants, 150, seed=1), *(3 * [*broken, *MISSING])]
    random.Random(2).shuffle(models)
    pid, before = alone.worker(), alone.status()["counters"]
    empty = memory_of(pid)

    with PeakMemory(pid) as peak:
        visits = visit_all(alone, models)

    assert find_wrong(alone, visits) == []
    assert {visit.answer.headers["X-Torchmoor-Instance"] for visit in visits if visit.answer.ok} == {FIRST}
    for visit in visits:
        if visit.model in MISSING:
            assert (visit.answer.status_code, "no model" in visit.answer.text) == (400, True), visit
        elif isinstance(visit.model, str):
            assert (visit.answer.status_code, broken[visit.model] in visit.answer.text) == (424, True), visit
    status = alone.status()
    counters = {name: number - before[name] for name, number in status["counters"].items()}
    assert len(variants) >= 200
    assert counters["evictions"] >= len(variants) - NUM_RESIDENT
    assert counters["hits"] > 0
    assert counters["loads"] - counters["evictions"] <= NUM_RESIDENT
    assert 0 < status["budgets"]["device"]["used"] <= status["budgets"]["device"]["max"]
    assert peak.most - (empty.private + empty.mapped) < NUM_RESIDENT * MINILM_BYTES + SLACK_BYTES
    assert peak.most_private - empty.private < NUM_HALF * MINILM_BYTES + SLACK_BYTES


@pytest.mark.parametrize("name", ["half-0", "minilm-100"])
def test_memory_of_an_unloaded_model_is_free_when_the_worker_says_so(name: str, alone: ManyFleet) -> None:
    """When an unload is acknowledged, its private or mapped bytes have been freed."""
    pid = alone.worker()
    # the part that all models share is loaded
    assert alone.answers_rightly("half-1" if name == "half-0" else "minilm-101")
    before = memory_of(pid)
    assert alone.answers_rightly(name)
    loaded = memory_of(pid)
    (row,) = [model for model in alone.status()["models"] if model["name"] == name]

    assert alone.operate("models", {"action": "unload", "model": name}).status_code == 200
    after = memory_of(pid)

    if name == "half-0":
        assert row["bytes"] > 0.9 * MINILM_BYTES
        assert loaded.private - after.private > 0.9 * row["bytes"]
    else:
        assert row["mapped_bytes"] > 0.9 * MINILM_BYTES > 10 * row["bytes"]
        assert loaded.mapped - before.mapped > 0.3 * row["mapped_bytes"]  # pages that one request has touched
        assert loaded.mapped - after.mapped > 0.9 * (loaded.mapped - before.mapped)


def test_memory_of_an_evicted_model_is_free_when_it_is_no_longer_counted(alone: ManyFleet) -> None:
    """When the status no longer lists a model, the kernel has its memory back."""
    pid = alone.worker()
    assert alone.answers_rightly("half-2")
    (row,) = [model for model in alone.status()["models"] if model["name"] == "half-2"]
    others = [variant for variant in alone.population.variants if not variant.is_half][: NUM_RESIDENT + 1]

    with ThreadPoolExecutor(1) as client:
        for other in others:  # one after the other, so that a single one is loaded between the two measurements
            loaded = memory_of(pid)
            asked = client.submit(visit_all, alone, [other])
            wait_until(lambda asked=asked: not is_counted(alone, "half-2") or asked.done(), "a model is loaded")
            if not is_counted(alone, "half-2"):
                break
            assert find_wrong(alone, asked.result()) == []
        after = memory_of(pid)
        assert find_wrong(alone, asked.result()) == []

    assert row["bytes"] > 0.9 * MINILM_BYTES
    # another model may have been loaded meanwhile, with little memory
    assert loaded.private - after.private > 0.65 * row["bytes"]


def is_counted(many: ManyFleet, name: str) -> bool:
    return any(model["name"] == name and model.get("counted_bytes", 0) for model in many.status()["models"])


@pytest.mark.parametrize(("old", "new"), [("minilm-004", "minilm-150"), ("packed-20.tar.gz", "packed-40.tar.gz")])
def test_a_model_that_is_replaced_answers_anew_and_never_wrongly(old: str, new: str, many: ManyFleet) -> None:
    """Requests get the old version's answers until the first of the new version, and then only those."""
    is_new: list[bool] = []

    def ask() -> bool:
        answer = many.ask(old, {"inputs": TEXTS[2]})
        is_new.append(many.is_right(many.variant(new), 2, answer))
        assert is_new[-1] or many.is_right(many.variant(old), 2, answer), answer.text[:300]
        return is_new[-1]

    assert not ask()
    replace_variant(many.population.source, old, new)
    wait_until(ask, "the new version answers")
    assert all(ask() for _ in range(10))


def test_a_killed_instance_costs_no_request_and_comes_back(many: ManyFleet) -> None:
    """After kill -9 of a TorchServe under load, the other answers; the first restarts and answers for every model."""
    changed = ("minilm-004", "packed-20.tar.gz")  # loaded by the test above
    variants = [variant for variant in many.population.variants if variant.name not in changed]
    worker = many.worker()
    visits = visit_all(many, zipf(variants, 60, seed=3))
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(visit_all, many, zipf(variants, 200, seed=4))
        wait_until(lambda: many.instance()["outstanding"] > 0, "the instance is at work")
        os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
        visits += asked.result()
    wait_until(lambda: is_back(many, worker), "the instance is started again")
    with many.only_the_first():
        again = visit_all(many, random.Random(5).sample(variants, 40))

    assert find_wrong(many, [*visits, *again]) == []
    assert {visit.answer.headers["X-Torchmoor-Instance"] for visit in again} == {FIRST}


def is_back(many: ManyFleet, old_worker: int) -> bool:
    return many.instance()["state"] == "ready" and many.worker() != old_worker
