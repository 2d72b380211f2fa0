"""The models' compute queue: fair turns, batches within limits, no work without a client."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from handlers.errors import HandlerError, InternalError, InvalidRequest, OutOfMemory, Overloaded
from handlers.many.compute import Compute, RowQueue, TaskRow
from handlers.settings.tasks import TaskSettings
from tests.waiting import wait_until


class Model:
    """A model that records its batches and waits while its gate is closed."""

    def __init__(self, compute: Compute, log: list[tuple[str, list[Any]]], name: str = "m") -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._log = log
        self._name = name
        self.queue = RowQueue(self._run)
        self._compute = compute

    def put(self, rows: Sequence[TaskRow]) -> None:
        self._compute.put(self.queue, rows)

    def _run(self, rows: Sequence[TaskRow]) -> list[Any]:
        assert self.gate.wait(60)
        self._log.append((self._name, [row.inputs for row in rows]))
        for row in rows:
            if isinstance(row.inputs, Exception):
                raise row.inputs
        return [row.inputs for row in rows]


@pytest.fixture
def compute() -> Iterator[Compute]:
    made = Compute(TaskSettings(max_rows=4, max_tokens=64, max_waiting=20), torch.device("cpu"))
    yield made
    made.stop()


def rows(values: Sequence[Any], told: dict[int, Any], size: int = 3, kind: Any = None, line: str = "") -> list[TaskRow]:
    first = len(told)
    made = []
    for i, value in enumerate(values, first):
        told[i] = None
        made.append(TaskRow(value, size, kind, lambda: True, partial(told.__setitem__, i), line))
    return made


def test_a_batch_has_what_waits_and_fits(compute: Compute) -> None:
    """A batch has at most max_rows and max_tokens with padding, of one kind and of similar sizes."""
    log: list[Any] = []
    told: dict[int, Any] = {}
    model = Model(compute, log)
    model.put(rows("abcdef", told))
    model.put(rows("ghi", told, size=30))
    model.put(rows("jk", told, kind="other"))
    model.put(rows("l", told, size=1000))

    compute.start()
    wait_until(lambda: None not in told.values(), "all are answered")

    batches = ["".join(batch) for _, batch in log]
    assert batches == ["abcd", "ef", "gh", "i", "jk", "l"]
    assert "".join(told.values()) == "abcdefghijkl"


def test_models_take_turns(compute: Compute) -> None:
    """A model with many rows makes the others wait for at most one batch each."""
    log: list[Any] = []
    told: dict[int, Any] = {}
    models = [Model(compute, log, name) for name in "xyz"]
    models[0].put(rows("a" * 16, told))
    models[1].put(rows("b", told))
    models[2].put(rows("c" * 5, told))

    compute.start()
    wait_until(lambda: None not in told.values(), "all are answered")

    assert [name for name, _ in log] == ["x", "y", "z", "x", "z", "x", "x"]


def test_rows_that_nobody_wants_are_not_computed(compute: Compute) -> None:
    """A row whose client disconnected while it waited is not computed."""
    log: list[Any] = []
    told: dict[int, Any] = {}
    model = Model(compute, log)
    wanted = {"b": False}
    made = rows("abc", told)
    made[1].is_wanted = lambda: wanted["b"]

    model.put(made)
    compute.start()
    wait_until(lambda: (told[0], told[2]) == ("a", "c"), "the others are answered")

    assert log == [("m", ["a", "c"])]
    assert told[1] is None


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (ValueError("x"), InternalError),
        (MemoryError(), OutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
        (InvalidRequest("x"), InvalidRequest),
    ],
)
def test_a_row_that_fails_fails_alone(error: Exception, answer: type[HandlerError], compute: Compute) -> None:
    """After a failed batch its rows run one by one, and only the faulty one is refused."""
    told: dict[int, Any] = {}
    model = Model(compute, [])
    model.put(rows(["a", error, "c"], told))

    compute.start()
    wait_until(lambda: None not in told.values(), "all are answered")

    assert (told[0], told[2]) == ("a", "c")
    assert type(told[1]) is answer


def test_a_failed_batch_keeps_no_memory_while_its_rows_run_alone(compute: Compute) -> None:
    """A failed batch releases its results before its rows run alone; on a GPU they would leave no memory for them."""
    told: dict[int, Any] = {}
    made: list[weakref.ref[torch.Tensor]] = []

    def run(batch: Sequence[TaskRow]) -> list[Any]:
        if len(batch) > 1:
            large = torch.zeros(1)
            made.append(weakref.ref(large))
            raise torch.OutOfMemoryError
        return [made[0]() is None]

    compute.put(RowQueue(run), rows("ab", told))

    compute.start()
    wait_until(lambda: None not in told.values(), "both are answered")

    assert told == {0: True, 1: True}


def test_a_queue_has_an_end(compute: Compute) -> None:
    """A request beyond the queue's limit is refused as a whole without computing any of it."""
    told: dict[int, Any] = {}
    model = Model(compute, [])
    model.put(rows("a" * 15, told))

    with pytest.raises(Overloaded, match="15 inputs wait"):
        model.put(rows("b" * 6, told))

    assert len(model.queue.waiting) == 15


def test_closing_a_queue_waits_for_what_runs_and_refuses_the_rest(compute: Compute) -> None:
    """After the close returns, the model's memory may be freed."""
    told: dict[int, Any] = {}
    model = Model(compute, [])
    model.gate.clear()
    compute.start()
    model.put(rows("a", told))
    wait_until(lambda: not len(model.queue.waiting), "the first batch runs")
    model.put(rows("b", told))
    closing = threading.Thread(target=compute.close, args=(model.queue,))

    closing.start()
    wait_until(lambda: model.queue.is_closed, "the queue is being closed")
    assert closing.is_alive()
    model.gate.set()
    closing.join(60)

    assert told[0] == "a"
    assert isinstance(told[1], Overloaded)
    with pytest.raises(Overloaded):
        model.put(rows("c", told))


def test_callers_take_turns_and_share_the_queue(compute: Compute) -> None:
    """Another caller's row is in the next batch; one caller may have half of the queue, callers without a name all."""
    log: list[Any] = []
    told: dict[int, Any] = {}
    model = Model(compute, log)
    model.gate.clear()
    compute.start()
    model.put(rows("x", told, line=""))
    wait_until(lambda: not model.queue.waiting, "the first batch runs")

    model.put(rows("abcdef", told, line="alice"))
    model.put(rows("gh", told, line="bob"))
    with pytest.raises(Overloaded, match="6 of your inputs wait"):
        model.put(rows("ijklm", told, line="alice"))
    model.put(rows("nopqrstuvwxy", told, line=""))
    model.gate.set()
    wait_until(lambda: not model.queue.is_scheduled, "all have run")

    assert log[1:3] == [("m", ["a", "g", "n", "b"]), ("m", ["c", "h", "o", "d"])]


def test_outputs_of_another_number_fail_their_rows_only(compute: Compute) -> None:
    """A batch that returns fewer outputs than inputs does not end the thread; its rows run alone and are answered."""
    told: dict[int, Any] = {}
    queue = RowQueue(lambda batch: [row.inputs for row in batch] if len(batch) == 1 else [])
    compute.put(queue, rows("ab", told))
    compute.put(RowQueue(lambda batch: []), rows("c", told))

    compute.start()
    wait_until(lambda: None not in told.values(), "all are answered")

    assert (told[0], told[1]) == ("a", "b")
    assert isinstance(told[2], InternalError)
