"""A loaded model that answers requests of one task, its rows batched with those of other requests."""

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from handlers.errors import HandlerError, InternalError
from handlers.many.compute import Compute, Row
from handlers.many.loading.placement import ModelPlacement
from handlers.many.request import TaskRequest, read_body, read_request
from handlers.many.tasks.task import Task, TaskWork
from handlers.reply import PendingReply
from handlers.requests import Incoming

logger = logging.getLogger(__name__)
JSON = {"Content-Type": "application/json"}


class TaskModel:
    """Implements `handlers.many.model.ResidentModel`. readers: the threads that check and tokenize."""

    def __init__(
        self,
        task: Task,
        placement: ModelPlacement,
        compute: Compute,
        readers: Executor,
        read: Callable[[Any], TaskRequest] = read_request,
    ) -> None:
        self.task = task
        self._placement = placement
        self._readers = readers
        self._read = read
        self.queue = compute.queue(task.run)

    @property
    def device_bytes(self) -> int:
        return self._placement.device_bytes

    @property
    def host_bytes(self) -> int:
        return self._placement.host_bytes

    @property
    def mapped_bytes(self) -> int:
        return self._placement.mapped_bytes

    def start(self, incoming: Incoming, reply: PendingReply) -> None:
        self._readers.submit(_guarded, reply, lambda: self._begin(incoming, reply))

    def _begin(self, incoming: Incoming, reply: PendingReply) -> None:
        reply.raise_if_cancelled()
        work = self.task.read(self._read(read_body(incoming)), reply)
        self.queue.put(_Answer(work, reply).rows())

    def to_host(self) -> None:
        self._placement.to_host()

    def to_device(self) -> None:
        self._placement.to_device()

    def close(self) -> None:
        self.queue.close()
        self._placement.close()


class _Answer:
    """Collects the outputs of one request's rows; the last output, or the first failure, writes the answer."""

    def __init__(self, work: TaskWork, reply: PendingReply) -> None:
        self._work = work
        self._reply = reply
        self._outputs: list[Any] = [None] * len(work.inputs)
        self._num_missing = len(work.inputs)
        self._lock = threading.Lock()

    def rows(self) -> list[Row]:
        return [
            Row(own.inputs, own.size, own.kind, self._is_wanted, self._taker(index))
            for index, own in enumerate(self._work.inputs)
        ]

    def _is_wanted(self) -> bool:
        return self._num_missing > 0 and not self._reply.is_cancelled

    def _taker(self, index: int) -> Callable[[Any], None]:
        def take(outcome: Any) -> None:
            if isinstance(outcome, HandlerError):
                self._fail(outcome)
            else:
                self._outputs[index] = outcome
                self._count()

        return take

    def _count(self) -> None:
        with self._lock:
            self._num_missing -= 1
            is_complete = self._num_missing == 0
        if is_complete:
            _guarded(self._reply, lambda: self._reply.finish(JSON, encode(self._work.finish(self._outputs))))

    def _fail(self, error: HandlerError) -> None:
        with self._lock:
            was_wanted, self._num_missing = self._num_missing > 0, 0
        if was_wanted:
            self._reply.fail(error)


def encode(answer: Any) -> bytes:
    """Encode an answer as JSON. Raises InternalError for NaN and infinity."""
    try:
        return json.dumps(answer, allow_nan=False).encode()
    except ValueError as exc:
        raise InternalError("the model's answer is not finite: its weights may be damaged") from exc


def _guarded(reply: PendingReply, action: Callable[[], None]) -> None:
    try:
        action()
    except HandlerError as error:
        reply.fail(error)
    except Exception:
        logger.exception("request failed %s", reply.ids)
        reply.fail(InternalError("the request could not be handled; the worker's log has the reason"))
