"""The pump: passes the rows of each TorchServe step to a service, and its answers back.

If a request is missing from a step's ids, its client has left. TorchServe detects that only for rows that it answers in
a step. For other rows, the proxy sends a cancel operation, which names requests by the proxy's ids
(docs/decisions/0011-cancel-and-metrics.md); the pump answers it. No exception may escape `handle`, because it would
fail every request in flight.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from time import thread_time
from typing import Any

from handlers.errors import HandlerError, InternalError, InvalidRequest, Overloaded, SettingsError
from handlers.requests.continuation import read_continuation
from handlers.requests.incoming import Incoming, check_accept
from handlers.requests.reply import PendingReply, WholeReply
from handlers.settings.pump import PumpSettings
from handlers.torchserve.step import Step, read_cancelled, read_timeout_s
from handlers.worker.counters import Counters
from torchmoor.wire import headers as wire
from torchmoor.wire import operations
from torchmoor.wire.continuation import MARKING
from torchmoor.wire.last_kept import LastKept

logger = logging.getLogger(__name__)

MAX_ID = 64  # characters of an id; longer ones are cut
MAX_EARLY = 1000  # remembered ids of requests that were cancelled before they arrived
MAX_PIECES_WAIT_S = 0.1  # longest wait of a stream's piece, so that TorchServe resends bodies less often
EARLY_S = 10.0  # how long such an id is remembered: a cancellation may overtake its request on another connection


class Pump:
    """Passes requests to a service and answers back. TorchServe's one worker thread only.

    start: begins to answer a request through the PendingReply and returns at once. Operations are passed to it even if
    the worker is full.
    """

    def __init__(
        self,
        settings: PumpSettings,
        start: Callable[[Incoming, PendingReply], None],
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._start = start
        self._counters = counters
        self._clock = clock
        self._used_s = thread_time()
        self._replies: dict[str, PendingReply] = {}  # by TorchServe's id of the row
        self._operations: set[str] = set()  # ids of rows that are operations; some are answered in a later step
        self._early: LastKept[str, float] = LastKept(MAX_EARLY)  # the proxy's id and when it is forgotten
        self._news = threading.Condition()
        self._next_pieces_at = 0.0  # when next pieces of streams may be sent; first and last ones do not wait

    def __repr__(self) -> str:
        return f"<Pump {self.num_in_flight} in flight>"

    @property
    def num_in_flight(self) -> int:
        return len(self._replies)

    @property
    def _num_requests(self) -> int:
        return len(self._replies) - len(self._operations)

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[bytes]:
        """Run one TorchServe step: return a body for each row, b"" for rows without an answer yet."""
        step = Step(rows, context)
        try:
            self._forget_all_but(set(step.request_ids.values()))
            for index, request_id in step.request_ids.items():
                if request_id not in self._replies:
                    self._begin(request_id, index, step)
            self._expire()
            self._wait(step)
        except Exception:
            logger.exception("step failed")
        for index, request_id in list(step.request_ids.items()):
            try:
                self._answer(index, request_id, step)
            except Exception:
                logger.exception("row failed")
                step.put(index, _error(InternalError("the answer could not be delivered")))
        self._count_round()
        return step.bodies

    def _count_round(self) -> None:
        """Count this round and the processor time of it, TorchServe's reading and writing included."""
        used_s = thread_time()
        self._counters.add("pump_rounds")
        self._counters.add("pump_cpu_us", round((used_s - self._used_s) * 1e6))
        self._used_s = used_s

    def _forget_all_but(self, request_ids: set[str]) -> None:
        for request_id in self._replies.keys() - request_ids:
            reply = self._replies.pop(request_id)
            self._operations.discard(request_id)
            _cancel(reply)
            if reply.error is not None:
                _log_failure(reply, reply.error)

    def _expire(self) -> None:
        now = self._clock()
        for reply in self._replies.values():
            try:
                reply.expire(now)
            except Exception:
                logger.exception("request could not be ended at its deadline")

    def _begin(self, request_id: str, index: int, step: Step) -> None:
        """Pass a new row to the service. A failure affects this row only."""
        is_full = self._num_requests >= self._settings.max_in_flight
        reply = self._replies[request_id] = PendingReply(self._wake)
        with reply.guarded():
            incoming = _identify(step.read(index), reply)
            operation = incoming.headers.get(wire.OPERATION)
            if operation:
                self._operations.add(request_id)
                if self._answer_operation(operation, incoming, reply):
                    return
            else:
                if is_full:
                    limit = self._settings.max_in_flight
                    raise Overloaded(f"{limit} requests are in flight already; try again later")
                check_accept(incoming)
            reply.shorten_deadline(self._clock() + read_timeout_s(incoming.headers))
            if reply.request_id and self._early.pop(reply.request_id, 0.0) > self._clock():
                reply.cancel()
            else:
                self._start(incoming, reply)

    def _answer_operation(self, operation: str, incoming: Incoming, reply: PendingReply) -> bool:
        """Answer an operation on the pump itself. Return False for one of the service."""
        if operation == operations.CANCEL:
            num_cancelled = self._cancel_all(read_cancelled(incoming.body))
            reply.finish_json({operations.NUM_CANCELLED: num_cancelled})
        elif operation == operations.IN_FLIGHT:
            reply.finish_json({operations.NUM_IN_FLIGHT: self._num_requests})
        else:
            return False
        return True

    def _cancel_all(self, wanted: set[str]) -> int:
        """End the requests of these ids in this step; return how many were found."""
        found = [reply for reply in self._replies.values() if reply.request_id in wanted]
        for reply in found:
            _cancel(reply)
        for request_id in wanted - {reply.request_id for reply in found}:
            self._early.keep(request_id, self._clock() + EARLY_S)
        return len(found)

    def _wake(self) -> None:
        with self._news:
            self._news.notify()

    def _wait(self, step: Step) -> None:
        """Wait until an answer or a part of one is ready, but not so long that a new request is delayed.

        TorchServe sends the body of an unanswered request again in each step, so steps take longer with longer bodies,
        and pieces of streams wait for a while: `resend_bytes_per_s` limits that cost.
        """
        present = {i: self._replies[r] for i, r in step.request_ids.items() if r in self._replies}
        replies = present.values()
        unanswered = [index for index, reply in present.items() if not reply.is_streaming]
        is_streaming = len(unanswered) < len(replies)
        wait_s = self._settings.stream_wait_s if is_streaming else self._settings.omitted_wait_s
        resend_s = sum(map(step.num_bytes, unanswered)) / self._settings.resend_bytes_per_s
        now = time.monotonic()
        deadline = now + min(0.5, wait_s + resend_s)
        pieces_at = max(self._next_pieces_at, now + min(MAX_PIECES_WAIT_S, resend_s))
        with self._news:
            while now < deadline and not any(reply.is_urgent() for reply in replies):
                wait_until = deadline
                if any(reply.has_news() for reply in replies):
                    if now >= pieces_at:
                        break
                    wait_until = min(deadline, pieces_at)
                self._news.wait(wait_until - now)
                now = time.monotonic()
        self._next_pieces_at = now + self._settings.stream_interval_s

    def _answer(self, index: int, request_id: str, step: Step) -> None:
        """Put what is ready of a row's answer into the step."""
        reply = self._replies.get(request_id)
        limit = self._settings.max_response_bytes
        answer = reply.take(limit) if reply is not None else _error(InternalError("the request could not be handled"))
        if isinstance(answer, WholeReply) and len(answer.body) > limit:
            what = f"the answer has {len(answer.body)} bytes, and may have {limit} (handler.pump.max_response_bytes)"
            answer = _error(InvalidRequest(f"{what}: ask for less at once"))
        if answer is None:
            step.defer(index)
            return
        is_over = isinstance(answer, WholeReply) or answer.is_end
        step.put(index, answer)
        if is_over:
            self._replies.pop(request_id, None)
            self._operations.discard(request_id)
            if reply is not None and reply.error is not None:
                _log_failure(reply, reply.error)


def check_batch_size(config: Mapping[str, Any], settings: PumpSettings) -> None:
    """Raise SettingsError unless TorchServe passes more rows than the pump accepts."""
    num_rows = config.get("batchSize", 1)
    if num_rows <= settings.max_in_flight:
        raise SettingsError(
            f"handler.pump.max_in_flight must be below the archive's batchSize ({num_rows}), not "
            f"{settings.max_in_flight}: what is beyond it would wait unseen in TorchServe"
        )


def _identify(incoming: Incoming, reply: PendingReply) -> Incoming:
    """Set the reply's ids and what its headers say of its form. Return the request without its continuation's part.

    Raises InvalidRequest.
    """
    reply.request_id = _id(incoming.headers.get(wire.REQUEST_ID, ""))
    reply.inference_id = _id(incoming.headers.get(wire.INFERENCE_ID, ""))
    incoming, reply.continuation = read_continuation(incoming)
    reply.may_mark = incoming.headers.get(wire.CONTINUABLE) == MARKING
    if incoming.custom_attributes:
        reply.receipts[wire.CUSTOM_ATTRIBUTES] = incoming.custom_attributes
    return incoming


def _id(text: str) -> str:
    """Remove line breaks and control characters from an id, so that it can be logged."""
    return "".join(letter for letter in text[:MAX_ID] if letter.isprintable())


def _log_failure(reply: PendingReply, error: HandlerError) -> None:
    """Log a failed request with the ids that the proxy's access log has."""
    level = logging.WARNING if error.status >= 500 else logging.DEBUG
    logger.log(level, "request failed %s code=%s status=%d", reply.ids, error.code, error.status)


def _cancel(reply: PendingReply) -> None:
    try:
        reply.cancel()
    except Exception:
        logger.exception("request could not be cancelled")


def _error(error: HandlerError) -> WholeReply:
    return WholeReply(error.status, error.headers(), error.body())
