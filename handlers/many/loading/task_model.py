"""A loaded model that answers requests of one task, its rows batched with those of other requests."""

import json
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from handlers.errors import HandlerError, InternalError, InvalidRequest, OutOfMemory
from handlers.many.compute import Compute, RowQueue, TaskRow
from handlers.many.loading.tensor_placement import Assembled, PlacedModel
from handlers.many.openai_bodies import TEXT_GENERATION, read_task_request
from handlers.many.request import TaskForm, TaskRequest
from handlers.many.tasks.task import EncodedAnswer, Task, TaskWork
from handlers.models.memory import is_out_of_memory
from handlers.requests.incoming import Incoming
from handlers.requests.reply import JSON, PendingReply
from handlers.worker.fair_threads import FairThreads
from torchmoor.wire import headers as wire


class TaskModel(PlacedModel):
    """Implements `handlers.many.model.AnsweringModel`.

    readers: the threads that check and tokenize. read: reads bodies, if not those of `openai_bodies`. metadata: the
    open inference protocol's; None if the model takes no tensors.
    """

    def __init__(
        self,
        task: Task,
        assembled: Assembled,
        device: torch.device,
        compute: Compute,
        readers: FairThreads,
        read: Callable[[Incoming, int], TaskRequest] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(assembled, device)
        self.task = task
        self._readers = readers
        self._read = read or partial(read_task_request, task=task.name, max_inputs=compute.settings.max_texts)
        self.metadata = metadata or {"versions": ["1"], "platform": task.name, "inputs": [], "outputs": []}
        self._compute = compute
        self.queue = RowQueue(task.run)

    def start(self, incoming: Incoming, reply: PendingReply) -> None:
        reply.line = incoming.caller.line
        self._readers.submit(reply.line, partial(self._begin, incoming, reply))

    def _begin(self, incoming: Incoming, reply: PendingReply) -> None:
        with reply.guarded():
            reply.raise_if_cancelled()
            if path := _find_path(incoming):
                message = f"this model's task is {self.task.name}, and {path} needs {TEXT_GENERATION}"
                raise InvalidRequest(message, param="model")
            request = self._read(incoming, self._compute.settings.max_json_values)
            try:
                work = self.task.read(request, reply)
            except Exception as exc:
                if not is_out_of_memory(exc):
                    raise
                raise OutOfMemory("this machine ran out of memory while reading the inputs; try again later") from exc
            if request.form is not None:
                work = _in_form(work, request.form)
            self._compute.put(self.queue, _Answer(work, reply).rows())

    def close(self) -> None:
        self._compute.close(self.queue)
        super().close()


def _in_form(work: TaskWork, form: TaskForm) -> TaskWork:
    """Return the work with its answer in another form."""
    num_tokens = sum(each.size for each in work.inputs)
    return TaskWork(work.inputs, lambda outputs: form.answer(work.finish(outputs), num_tokens))


def _find_path(incoming: Incoming) -> str:
    """Return the path of a request that only a model which generates text can answer; empty for other requests."""
    if route := incoming.headers.get(wire.TGI_ROUTE):
        return f"/{route}"
    resource = incoming.headers.get(wire.RESOURCE, "")
    return resource and "/v1/" + resource.partition(" ")[2].partition("/")[0].partition("?")[0]


class _Answer:
    """Collects the outputs of one request's rows; the last output, or the first failure, writes the answer."""

    def __init__(self, work: TaskWork, reply: PendingReply) -> None:
        self._work = work
        self._reply = reply
        self._outputs: list[Any] = [None] * len(work.inputs)
        self._num_missing = len(work.inputs)
        self._lock = threading.Lock()

    def rows(self) -> list[TaskRow]:
        return [
            TaskRow(own.inputs, own.size, own.kind, self._is_wanted, partial(self._take, index), self._reply.line)
            for index, own in enumerate(self._work.inputs)
        ]

    def _is_wanted(self) -> bool:
        return self._num_missing > 0 and not self._reply.is_cancelled

    def _take(self, index: int, outcome: Any) -> None:
        is_failure = isinstance(outcome, HandlerError)
        self._outputs[index] = outcome
        with self._lock:
            was_wanted = self._num_missing > 0
            self._num_missing = 0 if is_failure else self._num_missing - 1
            is_complete = self._num_missing == 0
        if was_wanted and is_failure:
            self._reply.fail(outcome)
        elif was_wanted and is_complete:
            with self._reply.guarded():
                answer = self._work.finish(self._outputs)
                if isinstance(answer, EncodedAnswer):
                    self._reply.finish(answer.headers, answer.body)
                else:
                    self._reply.finish(JSON, encode(answer))


def encode(answer: Any) -> bytes:
    """Encode an answer as JSON. Raises InternalError for NaN and infinity."""
    try:
        return json.dumps(answer, allow_nan=False).encode()
    except ValueError as exc:
        raise InternalError("the model's answer is not finite: its weights may be damaged") from exc
