"""The interface between HTTP and the application: calls and their verdicts.

For each request head the application returns a Reply, or a Call that decides about the request. A Call places the
request; if it goes to a target, its Forwarding renders the request's head and judges the answer. At the end, the
connection tells the Call the outcome, once. No method may block; all run on the event loop's thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from websockets.server import ServerProtocol

from torchmoor.proxy.http.answer import Answer, ClientSide, Loss
from torchmoor.proxy.http.fields import FieldNote
from torchmoor.proxy.http.message import AnswerHead, Reply, Request

WHOLE_BODY = sys.maxsize


class Target(Protocol):
    """Where a request can be sent.

    `idle` and `long_bodies` belong to `upstream`, which keeps its pooled connections and its LongBodyQueue there.
    num_pieces: the number of pieces of answers' bodies that arrived after their heads.
    """

    name: str
    host: str
    port: int
    idle: list[Any]
    long_bodies: Any
    num_pieces: int


class Outcome(Enum):
    """How a call ended."""

    ANSWERED = "answered"  # the instance's answer, or a Reply in its place, was written to its end
    BROKEN = "broken"  # the answer had begun, and its instance failed to finish it
    FAILED = "failed"  # the answer has ended with an error that is not a failure of its instance
    CLIENT_GONE = "client gone"  # the client left, or broke HTTP's rules when no error could be sent any longer


# Verdicts


@dataclass(slots=True)
class Send:
    """Send the request to a target; `forwarding` handles the rest."""

    target: Target
    forwarding: Forwarding


class Wait:
    """Keep the request until the call resumes the exchange, or until `wait_ends_at`."""


@dataclass(slots=True)
class ReadRefusal:
    """Read the beginning of the answer's body (MAX_REFUSAL_BYTES), and send the client what `explain` makes of it."""

    explain: Callable[[bytes], Reply]


class Hold:
    """Keep the answer until the call resumes the exchange, usually to deliver it."""


class PassOn:
    """Stop holding the answer: judge it again, and follow the new verdict."""


WAIT, HOLD, PASS_ON = Wait(), Hold(), PassOn()

NextStep = Send | Reply | Wait | PassOn
"""The verdict on a request: it is sent, answered, or waits."""

Judgement = Answer | ReadRefusal | Send | Wait | Hold
"""The verdict on an answer: it is delivered, explained, replaced by another target's, or held."""


class Waiter(Protocol):
    """The exchange, as its call uses it.

    status_replied and num_bytes_replied: of a Reply that was written in the answer's place, 0 without one.
    complete_at: when the request was whole, in monotonic seconds; read once it is. num_bytes_in: how much of the
    request's body was received.
    """

    complete_at: float
    num_bytes_in: int
    status_replied: int
    num_bytes_replied: int

    @property
    def num_tokens(self) -> int | None:
        """Return the number of tokens of a streamed answer; None if it is not given."""
        ...

    @property
    def source(self) -> str:
        """Return the client's address."""
        ...

    def resume(self, step: NextStep) -> None:
        """End the wait. Call this once, and not after the call has ended."""
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
    """Decides about one request.

    wait_ends_at: when on_wait_over is due, in monotonic seconds; read whenever the verdict is to wait.
    """

    max_body_bytes: int
    deadlines: Deadlines

    @property
    def num_read_bytes(self) -> int:
        """Return how many of the body's first bytes `route` reads, at most; WHOLE_BODY for all."""
        ...

    @property
    def wait_ends_at(self) -> float:
        """When a wait times out, in monotonic seconds."""
        ...

    def route(self, body: bytes, waiter: Waiter) -> NextStep:
        """Place the request. body: all of it, or at least its first num_read_bytes."""
        ...

    def on_wait_over(self) -> Reply:
        """Answer a request whose wait was too long."""
        ...

    def on_body_too_large(self) -> Reply:
        """Answer a request whose body is longer than max_body_bytes."""
        ...

    def limit_body(self, waiter: Waiter) -> None:
        """Lower max_body_bytes to what a target can hold. Called before the rest of an incomplete body is received."""
        ...

    def on_body_dropped(self) -> Reply:
        """Answer a request whose incomplete body was dropped to make room for others."""
        ...

    def finish(self, outcome: Outcome) -> None:
        """Release everything. Called exactly once, whatever happened."""
        ...


class Forwarding(Protocol):
    """Handles a request's way to its target, and the answer."""

    def request_head(self, framing: bytes, time_left_s: float | None) -> bytes:
        """Render the head for the chosen target; `framing` is its length header's line.

        time_left_s: how long the target's answer is awaited; None for as long as `deadlines` allows.
        """
        ...

    def on_abandoned(self) -> None:
        """Stop the target, which has the whole request and may be working on it: its answer is not awaited."""
        ...

    def on_answer(self, head: AnswerHead, *, can_replay: bool) -> Judgement:
        """Judge the answer's head. Send and Wait are allowed only if can_replay."""
        ...

    def on_lost(self, loss: Loss, *, can_replay: bool) -> NextStep:
        """Place the request again: its target will not answer. Send and Wait are allowed only if can_replay."""
        ...


class Continuer(Protocol):
    """Lets another target continue a marked answer whose own is lost (see torchmoor/wire/continuation.py)."""

    def place(self, loss: Loss) -> NextStep | None:
        """Choose the target for the rest of the answer; None if there is none."""
        ...

    def request(self, notes: bytes, body: bytes, time_left_s: float | None) -> tuple[bytes, bytes]:
        """Render head and body of the request for the rest. notes: the answer's; body: the original request's."""
        ...

    def accepts(self, head: AnswerHead) -> bool:
        """Return whether the chosen target continues the answer, by the head of its own."""
        ...

    def refuse(self) -> None:
        """Note that the answer will not be continued, because too much would have to be kept."""
        ...


class RunningRequest(Protocol):
    """A client's request that is forwarded and answered: an Exchange, or the fast path's in its place."""

    is_answered: bool

    @property
    def is_request_complete(self) -> bool: ...
    def on_request_piece(self, piece: bytes, *, is_complete: bool) -> None: ...
    def on_client_gone(self) -> None: ...
    def on_client_write_paused(self, is_paused: bool) -> None: ...
    def on_target_down(self, target: Target) -> None: ...
    def expire(self, refusal: Reply) -> None: ...
    def fault(self, refusal: Reply) -> None: ...


class FastClient(ClientSide, Protocol):
    """A client's connection. exchange: the request that is running there."""

    exchange: RunningRequest | None


class FastPath(Protocol):
    """Serves some requests in fewer steps, with the same result."""

    def try_send(self, client: FastClient, request: Request, body: bytes) -> bool:
        """Forward a whole request as the client's exchange, or change nothing and return False."""
        ...

    def may_take(self, request: Request) -> bool:
        """Return True if it is worth waiting for one more read of the request's body."""
        ...


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """The request that a WebSocket message stands for, with its whole body, and the verdict on it."""

    request: Request
    body: bytes
    decision: Call | Reply


class MessageHandler(Protocol):
    """Makes requests of a WebSocket connection's messages, one at a time, and messages of their answers.

    farewell: the message that precedes the end of a connection that is too old.
    """

    farewell: bytes

    def hold(self, num_bytes: int) -> bool:
        """Set the bytes of held messages. Returns False if all connections together hold too much."""
        ...

    def begin(self, message: bytes) -> MessageRequest | bytes:
        """Read a message. Returns its request, or the message that refuses it."""
        ...

    def on_answer(self, status: int, piece: bytes) -> list[bytes]:
        """Receive a piece of an answer's body. Returns the messages that it completes."""
        ...

    def on_answer_end(self, *, is_whole: bool) -> list[bytes]:
        """Receive the end of an answer. Returns the last messages."""
        ...

    def close(self) -> None:
        """Release everything. Called once."""
        ...


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Speak WebSocket with the client from now on. accepted: the opening handshake as the client gets it."""

    protocol: ServerProtocol
    accepted: bytes
    handler: MessageHandler


class Application(Protocol):
    """Decides what each request is."""

    def note(self, name: bytes) -> FieldNote:
        """Return how fields of that name are treated; called once for a name that many requests have."""
        ...

    def find_handler(self, method: bytes, path: bytes) -> Any:
        """Return what `handle` calls for requests with this line; called once for a line that many requests have."""
        ...

    def handle(self, request: Request) -> Call | Reply:
        """Handle a request whose head is complete."""
        ...

    def upgrade(self, request: Request) -> Upgrade | Reply:
        """Handle a request for another protocol, which has no body."""
        ...

    def refuse(self, status: int, message: str) -> Reply:
        """Answer bytes that are not a valid HTTP request."""
        ...
