"""The task protocol: how a request becomes rows of a batch, and their outputs an answer."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from handlers.many.compute import TaskRow
from handlers.many.request import TaskRequest
from handlers.requests.reply import PendingReply


@dataclass(frozen=True, slots=True)
class Input:
    """The input of one row, see `compute.TaskRow`."""

    inputs: Any
    size: int
    kind: Hashable


@dataclass(frozen=True, slots=True)
class EncodedAnswer:
    """An answer that is not JSON."""

    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class TaskWork:
    """The rows of a request. finish: converts their outputs, in order, to JSON or an EncodedAnswer."""

    inputs: Sequence[Input]
    finish: Callable[[Sequence[Any]], Any]


class Task(Protocol):
    """A model with its task. `read` and `finish` run on any thread, `run` on one at a time."""

    name: str

    def read(self, request: TaskRequest, reply: PendingReply) -> TaskWork:
        """Check and tokenize a request. reply: cancels slow steps, such as fetching an image.

        Raises the BadInput and BadImage families.
        """
        ...

    def run(self, rows: Sequence[TaskRow]) -> Sequence[Any]:
        """Compute one batch on the device. Returns outputs on the CPU."""
        ...
