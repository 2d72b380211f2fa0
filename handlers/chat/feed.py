"""The clients that follow a response in the background: each gets the events after the one it names, once, in order.

The response is generated whether or not a client follows. Events are not stored. The feed makes the events that a new
client has missed from the response's form, which has the output so far, and later events from the same tokens. If the
response is generated again, its tokens are the same, so a client continues after the events that it has.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from handlers.chat.forms import AnswerForm, Token
from handlers.errors import HandlerError
from handlers.requests.reply import PendingReply


class FollowedForm(AnswerForm, Protocol):
    """The form of an answer that clients can follow. Each client has a form of its own, of the same kind."""

    def follow(self, starting_after: int, *, is_running: bool) -> "tuple[FollowedForm, bytes]":
        """Make the form of a client that has the events up to this number. Encode the later events that exist."""
        ...

    @property
    def resume_after(self) -> int:
        """The number of the last event that the client has."""
        ...

    def note(self, token: Token) -> None:
        """Count a token without encoding it."""
        ...

    def end_like(self, form: Any, token: Token) -> bytes:
        """Encode the last token and the end. form: another form of the answer, which has them already."""
        ...

    def fail(self, fields: dict[str, Any]) -> bytes:
        """Encode the end of a response without an answer. fields: of the response object."""
        ...


@dataclass(slots=True, eq=False)
class _Follower:
    reply: PendingReply
    form: FollowedForm


class AnswerFeed:
    """Passes an answer on to clients. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._followers: list[_Follower] = []
        self._form: FollowedForm | None = None  # of the answer while it is generated
        self._read: Callable[[], None] = lambda: None
        self._stopped: HandlerError | None = None

    def follow(self, reply: PendingReply, form: FollowedForm, starting_after: int, headers: dict[str, str]) -> None:
        """Let a client follow. form: the answer's form, used if its generation has not begun."""
        with self._lock:
            is_running = self._form is not None
            own, data = (self._form or form).follow(starting_after, is_running=is_running)
            follower = _Follower(reply, own)
            self._followers.append(follower)
            reply.begin(
                {"Content-Type": own.content_type, **headers}, lambda error: follower.form.error(error), self._fill
            )
            reply.write(data)
        reply.wake()
        reply.on_end(lambda: self._forget(follower))
        if self._stopped is not None:
            reply.fail(self._stopped)

    def begin(self, form: FollowedForm, read: Callable[[], None]) -> None:
        """Begin to generate the answer, perhaps for a second time. read: adds the announced tokens."""
        with self._lock:
            self._form, self._read = form, read
            for follower in self._followers:
                follower.form, data = form.follow(follower.form.resume_after, is_running=True)
                follower.reply.write(data)
        self._wake()

    def announce(self) -> None:
        """Note that `read` has tokens to add. The engine wakes the readers."""
        for follower in tuple(self._followers):
            follower.reply.announce()

    def add(self, form: FollowedForm, tokens: Sequence[Token]) -> None:
        """Add tokens, which are not the last, unless another attempt has begun to generate the answer. form: theirs."""
        with self._lock:
            if self._form is not form:
                return
            for token in tokens:
                form.note(token)
            for follower in self._followers:
                follower.reply.write(b"".join(follower.form.token(token, None) for token in tokens))

    def end(self, token: Token) -> None:
        """Add the last token and the end, which the form has."""
        form = self._form
        self._end(lambda follower: follower.form.end_like(form, token))

    def fail(self, fields: dict[str, Any]) -> None:
        """End an answer that will not be generated. fields: of the response object."""
        self._end(lambda follower: follower.form.fail(fields))

    def _end(self, encode: Callable[[_Follower], bytes]) -> None:
        """End the clients' streams. Not under the lock, because their readers may take it while they are woken."""
        with self._lock:
            self._form = None
            ended = [(follower.reply, encode(follower)) for follower in self._followers]
            self._followers = []
        for reply, data in ended:
            reply.write(data, is_end=True)

    def stop(self, error: HandlerError) -> None:
        """Let the readers break the clients' streams: the session has ended. Takes no lock."""
        self._stopped = error
        self.announce()
        self._wake()

    def _fill(self) -> None:
        if self._stopped is None:
            self._read()
            return
        for follower in tuple(self._followers):
            follower.reply.fail(self._stopped)

    def _wake(self) -> None:
        for follower in tuple(self._followers):
            follower.reply.wake()

    def _forget(self, follower: _Follower) -> None:
        with self._lock:
            if follower in self._followers:
                self._followers.remove(follower)
