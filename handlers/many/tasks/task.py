"""What every task offers, and how one request becomes rows of a batch and an answer again."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from handlers.many.compute import Row
from handlers.many.request import TaskRequest
from handlers.reply import Reply


@dataclass(frozen=True, slots=True)
class Input:
    """One row's input before it waits: see `compute.Row`."""

    inputs: Any
    size: int
    kind: Hashable = None


@dataclass(frozen=True, slots=True)
class TaskWork:
    """A request that has been read. finish: from the outputs of its rows, in order, to what JSON can say."""

    inputs: Sequence[Input]
    finish: Callable[[Sequence[Any]], Any]


class Task(Protocol):
    """One model and what it does. `read` and `finish` run on any thread, `run` on one at a time."""

    name: str

    def read(self, request: TaskRequest, reply: Reply) -> TaskWork:
        """Check and tokenize. reply: for what takes long, such as fetching an image.

        Raises the BadInput and BadImage families.
        """
        ...

    def run(self, rows: Sequence[Row]) -> Sequence[Any]:
        """One batch on the device. The outputs are on the CPU."""
        ...
