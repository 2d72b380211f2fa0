"""What the data plane asks the application: the seam between HTTP and everything that has an opinion.

For each request head the application gives a Reply (answered at once) or a Call. A Call chooses the target,
writes the head of the forwarded request, judges the answer's head, and is told once how it ended. None of its
methods may block; all run on the event loop's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from torchmoor.proxy.http.answer import Answer, Loss
from torchmoor.proxy.http.fields import Note
from torchmoor.proxy.http.message import AnswerHead, Reply, Request


class Target(Protocol):
    """Where a request can be sent. `idle` belongs to `upstream`, which keeps its pooled connections there."""

    name: str
    host: str
    port: int
    idle: list[Any]


class Outcome(Enum):
    """How a call ended."""

    ANSWERED = "answered"  # the instance's answer, or a Reply in its place, was written to its end
    BROKEN = "broken"  # the answer had begun and could not be finished
    CLIENT_GONE = "client gone"  # it left, or broke the rules when it was too late to tell it so


class Waiting(Enum):
    """A call's verdict that no target can take the request yet."""

    WAITING = "waiting"  # the call will use its Waiter, or be told on_wait_over


WAITING: Final = Waiting.WAITING


class Waiter(Protocol):
    """The exchange, as its call uses it.

    status_replied and num_bytes_replied: of a Reply that was written in the answer's place, 0 if none was.
    """

    status_replied: int
    num_bytes_replied: int

    @property
    def num_bytes_in(self) -> int:
        """Of the request's body."""
        ...

    def resume(self, verdict: Target | Reply | Waiting) -> None:
        """The wait is over; once, and not after the call was told the end."""
        ...


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits of one call's answer, counted from the end of the request.

    idle_s: the longest silence within the answer's body; None if only the total counts.
    """

    first_byte_s: float
    total_s: float
    idle_s: float | None = None


class Call(Protocol):
    """One request that is forwarded.

    num_prefix_bytes: how much of the body's beginning `route` wants; 0 to be asked at the request's head.
    wait_ends_at: when on_wait_over is due, in monotonic seconds; read whenever a verdict is WAITING.
    """

    max_body_bytes: int
    deadlines: Deadlines
    num_prefix_bytes: int

    @property
    def wait_ends_at(self) -> float:
        """When a wait has been too long."""
        ...

    def route(self, prefix: bytes, waiter: Waiter) -> Target | Reply | Waiting:
        """Choose where the request goes. prefix: num_prefix_bytes of the body or more, or all of it."""
        ...

    def on_wait_over(self) -> Reply:
        """The request has waited too long for a target."""
        ...

    def request_head(self, framing: bytes, time_left_s: float | None) -> bytes:
        """The forwarded request's whole head for the chosen target; `framing` is its length header's line.

        time_left_s: the target's answer is given up after that; None for the whole of what `deadlines` gives.
        """
        ...

    def on_abandoned(self) -> None:
        """The chosen target has the whole request and may be working on it, but no answer is awaited any more."""
        ...

    def on_answer(self, head: AnswerHead, *, can_replay: bool) -> Answer | Target | Waiting | None:
        """Judge the answer's head: pass it on, send the request to another target, or None: read the body first.

        A Target or WAITING may be returned only if can_replay.
        """
        ...

    def on_refusal(self, body: bytes) -> Reply:
        """The body asked for by None above, cut at the limit for error bodies."""
        ...

    def on_lost(self, loss: Loss, *, can_replay: bool) -> Target | Reply | Waiting:
        """No answer will come. A Target or WAITING may be returned only if can_replay."""
        ...

    def on_body_too_large(self) -> Reply:
        """The request's body turned out longer than max_body_bytes."""
        ...

    def finish(self, outcome: Outcome) -> None:
        """The end, told exactly once, whatever happened."""
        ...


class Application(Protocol):
    """Decides what each request is."""

    def note(self, name: bytes) -> Note:
        """What becomes of fields of that name; asked once for a name that many requests have."""
        ...

    def find_handler(self, method: bytes, path: bytes) -> Any:
        """Who serves such requests, for `handle`; asked once for a line that many requests have."""
        ...

    def handle(self, request: Request) -> Call | Reply:
        """A request's head is complete."""
        ...

    def refuse(self, status: int, message: str) -> Reply:
        """The answer to something that is not a servable HTTP request."""
        ...
