"""Which sessions exist and what happened in them: a protocol, implemented with a journal and without one."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from handlers.chat.sessions.session import Session
from handlers.journal.event import Event
from handlers.journal.journal import Listed
from handlers.requests.incoming import Caller


class KnownSessions(Protocol):
    """Knows sessions, also those that this worker does not hold.

    All methods but `try_undo` block on the journal, and raise JournalUnavailable if it fails: call them on worker
    threads only, never on the engine's or TorchServe's.
    """

    @property
    def used_bytes(self) -> int:
        """The bytes in the journal, as last measured."""
        ...

    @property
    def num_sessions(self) -> int:
        """The open sessions in the journal, as last measured."""
        ...

    def check_room(self, caller: Caller) -> None:
        """Raise Overloaded or CallerBudgetReached if the journal has no room for another session of this caller."""
        ...

    def is_known(self, session_id: str) -> bool:
        """Return True if the session has a journal. Raises SessionClosed, SessionLost."""
        ...

    def read_events(self, session: Session) -> Sequence[Event]:
        """Return the recorded events that this worker's session lacks. Raises SessionClosed, SessionLost."""
        ...

    def write(self, session: Session, event: Event, encoded_images: Sequence[bytes]) -> None:
        """Write the images of the session's next event, then the event.

        Raises TurnConflict if another worker wrote first, SessionClosed, SessionLost, InvalidRequest if the event is
        too large.
        """
        ...

    def read_image(self, session: Session, digest: str) -> bytes:
        """Return the encoded bytes of one of the session's images. Raises the SessionGone family."""
        ...

    def read_resource(self, session_id: str) -> dict[str, Any] | None:
        """Return the fields that an open session was opened with; None if it has ended."""
        ...

    def enlist(self, session: Session) -> None:
        """Add a session that has a label to the list of its owner."""
        ...

    def list_owned(self, caller: Caller) -> list[Listed]:
        """Return the caller's listed sessions. Some may have ended."""
        ...

    def find(self, name: str) -> str | None:
        """Return the id of a session in the journal by its hash. Lists all sessions: for operators only."""
        ...

    def claim_opening(self, caller: Caller, invocation_id: str, names: tuple[str, ...], session_id: str) -> str:
        """Return the session for an opening: `session_id`, or the one that the same request has opened before.

        An earlier opening does not count after its session has been closed. With a journal, it may be another
        instance's. Call this after the opening is recorded, because another instance may answer with the session at
        once. If another session is returned, undo this opening.
        """
        ...

    def try_undo(self, session_id: str) -> bool:
        """Return whether the caller may undo the session's opening: no retry at this worker got the session.

        Any thread: does not block.
        """
        ...

    def discard(self, session_id: str) -> None:
        """Delete the journal of an undone opening, unless another instance has answered a retry with this session."""
        ...

    def try_close(self, session_id: str, session: Session | None, invocation_id: str) -> bool:
        """Delete the session's journal, but remember which request closed it.

        session: None if not on this worker. Return False if another request was first.
        """
        ...

    def has_closed(self, session_id: str, invocation_id: str) -> bool:
        """Return True if this request closed the session before."""
        ...

    def sweep(self, expired_before: int, *, is_full: bool) -> None:
        """Delete journals of sessions that expired before this time. is_full: see `Journal.sweep`."""
        ...


def opening_name(caller: Caller, invocation_id: str, names: Sequence[str]) -> str:
    """Return the name of an opening; different callers, requests and contents have different names."""
    return json.dumps(["opening", caller.endpoint, caller.principal, invocation_id, *names])
