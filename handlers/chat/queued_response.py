"""Work that sessions queue: turns, and responses in the background, which later become turns."""

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

from handlers.chat.feed import AnswerFeed
from handlers.chat.images.store import Image
from handlers.errors import (
    HandlerError,
    ResponseCancelled,
    ResponseUnknown,
    SessionGone,
    SessionLost,
    TurnConflict,
)
from handlers.journal.event import Event


class QueuedTurn(Protocol):
    """A turn in a session's queue. The queue begins it when the turns before it are over."""

    def begin(self) -> None:
        """Start the turn's work. Must return at once."""
        ...

    def stop(self, error: HandlerError) -> None:
        """End the turn early with this error. Must return at once."""
        ...

    def end_early(self) -> bool:
        """End the answer with its next token. Return False if no answer is being generated."""
        ...


@dataclass(slots=True, eq=False)
class QueuedResponse:
    """A response in the background that is not yet an entry of its session.

    number: of its future entry. event: records its question. feed: the clients of this worker that follow it.
    ended: if it has ended without an answer, the fields of its object that say why. turns: the attempts to generate it
    on this worker; the queue may ask again while one runs.
    Used in conversations only: images: wait for its turn. has_begun: an attempt has read the conversation. is_changed:
    the conversation has changed since then, so another attempt would give another answer.
    """

    number: int
    event: Event
    ended: dict[str, Any] | None = None
    feed: AnswerFeed = field(default_factory=AnswerFeed)
    turns: list[QueuedTurn] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    has_begun: bool = False
    is_changed: bool = False

    @property
    def entry(self) -> int:
        """The number of the entry that it has reserved in a conversation; 0 without one."""
        return self.number if self.event.entry else 0

    def forget(self, turn: QueuedTurn) -> None:
        """Remove an attempt that has ended."""
        if turn in self.turns:
            self.turns.remove(turn)

    def stop_if_ended(self) -> None:
        """Stop its turns if the response has ended. Called when it ends, and when a turn is in the session's queue."""
        if self.ended is None:
            return
        for turn in tuple(self.turns):  # another thread may end one
            turn.stop(ResponseCancelled("this response was cancelled"))

    def raise_if_changed(self) -> None:
        if self.is_changed:
            raise TurnConflict("the conversation has changed since this response began; ask again")

    def raise_if_ended(self) -> None:
        if self.ended is not None:
            raise ResponseCancelled(f"this response is {self.ended['status']} already")

    def end_feed(self, end: SessionGone) -> None:
        """Break the streams of the clients that follow, because the session has ended. Takes no lock."""
        gone = ResponseUnknown("this response was deleted or has expired", api_code="not_found")
        self.feed.stop(end if isinstance(end, SessionLost) else gone)

    def shown(self, *, is_running: bool) -> Event:
        """Return the response as an entry shows it. is_running: this worker generates it."""
        state = self.ended or {"status": "in_progress" if is_running else "queued"}
        fields = {**json.loads(self.event.response), **state}
        return Event(kind="turn", question=self.event.question, response=json.dumps(fields, ensure_ascii=False))
