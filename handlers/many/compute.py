"""The compute threads, shared by all models, and each model's queue of rows.

A thread takes the next model, runs as many of its waiting rows as fit one batch, and puts the model behind the others
if rows are left: a busy model gets larger batches, not more turns. A free thread never waits for a larger batch. Rows
of clients that have left are dropped before they run.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import Any

import torch

from handlers.engine.builtin.engine import is_device_lost
from handlers.errors import HandlerError, InternalError, OutOfMemory, Overloaded
from handlers.models.memory import is_out_of_memory
from handlers.settings.tasks import TaskSettings
from handlers.worker.device import use_device

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class TaskRow:
    """One input of one request.

    size: its tokens; the rows of a batch are padded to the largest. kind: rows of different kinds never share a batch.
    on_done: called once from a compute thread, with the row's output or the error; must not raise. line: its caller's.
    """

    inputs: Any
    size: int
    kind: Hashable
    is_wanted: Callable[[], bool]
    on_done: Callable[[Any], None]
    line: str = ""

    @property
    def bucket(self) -> Hashable:
        """The kind, and the size within a factor of two, which bounds the cost of padding."""
        return self.kind, self.size.bit_length()


@dataclass(eq=False, slots=True)
class RowQueue:
    """The waiting rows of one model, of which at most one batch runs at a time.

    run: computes one output per row of a batch.
    """

    run: Callable[[Sequence[TaskRow]], Sequence[Any]]
    waiting: deque[TaskRow] = field(default_factory=deque)
    is_scheduled: bool = False  # queued for a thread, or running
    is_closed: bool = False


class Compute:
    """Runs batches of all models from `start` to `stop`.

    on_device_lost: called when the device has failed and only a new process can use it.
    """

    def __init__(
        self, settings: TaskSettings, device: torch.device, on_device_lost: Callable[[], None] = lambda: None
    ) -> None:
        self.settings = settings
        self._device = device
        self._on_device_lost = on_device_lost
        self._line: deque[RowQueue] = deque()
        self._running: set[RowQueue] = set()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"compute-{i}", daemon=True) for i in range(settings.num_threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads; waiting rows are not answered."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=30)

    def put(self, queue: RowQueue, rows: Sequence[TaskRow]) -> None:
        """Queue rows of one request, all or none. A caller may have half of the queue. Raises Overloaded."""
        limit = self.settings.max_waiting
        with self._changed:
            if queue.is_closed or self._is_stopping:
                raise Overloaded("the model is leaving memory; try again")
            if len(queue.waiting) + len(rows) > limit:
                raise Overloaded(f"{len(queue.waiting)} inputs wait for this model, of {limit}; try again later")
            line = rows[0].line if rows else ""
            own = sum(row.line == line for row in queue.waiting) if line else 0
            if own and own + len(rows) > limit // 2:
                raise Overloaded(f"{own} of your inputs wait for this model, of {limit // 2}; try again later")
            queue.waiting.extend(rows)
            if not queue.is_scheduled:
                queue.is_scheduled = True
                self._line.append(queue)
                self._changed.notify()

    def close(self, queue: RowQueue) -> None:
        """Fail the queue's rows and wait for its running batch."""
        with self._changed:
            queue.is_closed = True
            left = list(queue.waiting)
            queue.waiting.clear()
            while queue in self._running:
                self._changed.wait()
        for row in left:
            _deliver(row, Overloaded("the model left memory; try again"))

    def _work(self) -> None:
        torch.set_num_threads(self.settings.threads_per_batch)
        use_device(self._device)
        while True:
            with self._changed:
                while not self._line and not self._is_stopping:
                    self._changed.wait()
                if self._is_stopping:
                    return
                queue = self._line.popleft()
                self._running.add(queue)
                batch = self._take(queue)
            try:
                if batch:
                    self._run(queue, batch)
            finally:
                with self._changed:
                    self._running.discard(queue)
                    queue.is_scheduled = bool(queue.waiting)
                    if queue.is_scheduled:
                        self._line.append(queue)
                    self._changed.notify_all()

    def _take(self, queue: RowQueue) -> list[TaskRow]:
        """Take the next waiting row and more of its bucket, within the limits of a batch. Callers take turns."""
        wanted = [row for row in queue.waiting if row.is_wanted()]
        batch: list[TaskRow] = []
        size = 0
        for row in _in_turns(wanted):
            if batch and row.bucket != batch[0].bucket:
                continue
            size = max(size, row.size)
            is_full = len(batch) == self.settings.max_rows or size * (len(batch) + 1) > self.settings.max_tokens
            if batch and is_full:
                break
            batch.append(row)
        taken = set(batch)
        queue.waiting = deque(row for row in wanted if row not in taken)
        return batch

    def _run(self, queue: RowQueue, batch: Sequence[TaskRow]) -> None:
        try:
            with torch.inference_mode():
                outputs = queue.run(batch)
                if len(outputs) != len(batch):
                    raise RuntimeError(f"the model gives {len(outputs)} outputs for {len(batch)} inputs")
        except Exception as exc:
            clear_frames(exc.__traceback__)  # they hold the failed batch's tensors
            if is_device_lost(self._device):
                logger.critical("device lost error=%s", exc)
                self._on_device_lost()
            if len(batch) > 1:  # retry alone, so that only the failing row is not answered
                for row in batch:
                    self._run(queue, [row])
            else:
                _deliver(batch[0], _translate(exc))
            return
        for row, output in zip(batch, outputs, strict=True):
            _deliver(row, output)


def _in_turns(rows: Sequence[TaskRow]) -> list[TaskRow]:
    """Return the rows in turns: the first of each line in the order of arrival, then the second of each, and so on."""
    places: Counter[str] = Counter()
    order: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        order.append((places[row.line], index))
        places[row.line] += 1
    return [rows[index] for _, index in sorted(order)] if len(places) > 1 else list(rows)


def _deliver(row: TaskRow, outcome: Any) -> None:
    try:
        row.on_done(outcome)
    except Exception:
        logger.exception("a row's callback failed")


def _translate(exc: Exception) -> HandlerError:
    if isinstance(exc, HandlerError):
        return exc
    if is_out_of_memory(exc):
        return OutOfMemory("there was no memory left to compute this answer; send less at once")
    logger.error("batch failed", exc_info=exc)
    return InternalError("the model failed on this input; the worker's log has the reason")
