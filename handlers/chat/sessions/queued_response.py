"""A response in the background that its session has accepted, until it is a turn of the session."""

import json
from dataclasses import dataclass, field
from typing import Any

from handlers.chat.feed import AnswerFeed
from handlers.errors import ResponseCancelled, ResponseUnknown, SessionGone, SessionLost
from handlers.journal.event import Event


@dataclass(slots=True, eq=False)
class QueuedResponse:
    """number: that its entry will have. event: says what is asked. feed: the clients that follow it here.

    ended: fields of its object that say why it has ended without an answer; None if it has not.
    """

    number: int
    event: Event
    ended: dict[str, Any] | None = None
    feed: AnswerFeed = field(default_factory=AnswerFeed)

    def raise_if_ended(self) -> None:
        if self.ended is not None:
            raise ResponseCancelled(f"this response is {self.ended['status']} already")

    def end_feed(self, end: SessionGone) -> None:
        """Break the streams of the clients that follow, because the session has ended. Takes no lock."""
        gone = ResponseUnknown("this response was deleted or has expired", api_code="not_found")
        self.feed.stop(end if isinstance(end, SessionLost) else gone)

    def shown(self, *, is_running: bool) -> Event:
        """Return the response in the form of an entry. is_running: this worker generates it."""
        state = self.ended or {"status": "in_progress" if is_running else "queued"}
        fields = {**json.loads(self.event.response), **state}
        return Event(kind="turn", question=self.event.question, response=json.dumps(fields, ensure_ascii=False))
