"""Threads of a worker: callers take turns, and cancelled work leaves nothing behind."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from handlers.worker.fair_threads import FairThreads
from tests.unit.handlers.conftest import ServiceFactory

ALICE, BOB = ({"x-torchmoor-endpoint": "e", "x-torchmoor-principal": name} for name in ("alice", "bob"))


class Held:
    """One thread that is busy until `release`, and the order in which actions run."""

    def __init__(self) -> None:
        self.threads = FairThreads(1, "test")
        self.order: list[str] = []
        self._may_go_on = threading.Event()
        self.threads.submit("", lambda: self._wait())

    def _wait(self) -> None:
        assert self._may_go_on.wait(60)

    def submit(self, name: str) -> Any:
        return self.threads.submit(name[0], lambda: self.order.append(name))

    def release(self) -> None:
        self._may_go_on.set()


def test_lines_take_turns() -> None:
    """A queue with much work does not delay one with little; cancelled work does not run."""
    held = Held()
    made = [held.submit(name) for name in ("a1", "a2", "a3", "b1", "c1", "b2")]

    assert made[1].cancel()
    held.release()
    for future in (made[0], *made[2:]):
        future.result(60)

    assert held.order == ["a1", "b1", "c1", "a3", "b2"]
    held.threads.shutdown()


def test_the_end_waits_for_all_work_and_refuses_more() -> None:
    held = Held()
    last = held.submit("a1")
    ending = threading.Thread(target=held.threads.shutdown)
    ending.start()
    held.release()
    ending.join(60)

    assert last.done()
    with pytest.raises(RuntimeError):
        held.submit("a2")


def test_a_failure_is_its_own_only() -> None:
    """After an action fails, the thread runs the next one."""
    held = Held()
    failed = held.threads.submit("a", lambda: [][0])
    after = held.submit("a1")
    held.release()

    assert isinstance(failed.exception(60), IndexError)
    after.result(60)
    held.threads.shutdown()


class HeldModel:
    """A model whose tokenizer waits for `release`, and the prompts in the order in which they are tokenized."""

    def __init__(self, model: Any) -> None:
        self.prompts: list[str | None] = []
        self._model = model
        self._may_go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_prompt(self, pieces: Sequence[str | None], image_sizes: Sequence[int]) -> list[int]:
        self.prompts += pieces
        assert self._may_go_on.wait(60)
        return self._model.encode_prompt(pieces, image_sizes)

    def release(self) -> None:
        self._may_go_on.set()


def test_a_caller_with_many_questions_delays_its_own(make_client: ServiceFactory, tiny_llava: Any) -> None:
    """Another caller's question is prepared after one of the many that a caller has sent, not after all."""
    model = HeldModel(tiny_llava)
    client = make_client(model, engine={"prepare_threads": 1})
    asked = [(f"alice {number}", ALICE) for number in range(4)] + [("bob", BOB)]

    sent = [client.send({"inputs": text, "parameters": {"max_new_tokens": 1}}, caller) for text, caller in asked]
    model.release()

    assert {each.wait().status for each in sent} == {200}
    assert model.prompts == ["alice 0", "alice 1", "bob", "alice 2", "alice 3"]
