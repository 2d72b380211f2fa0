"""A journal's failures as the errors that clients get."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from handlers.chat.sessions.store import SessionStore
from handlers.errors import InvalidRequest, JournalUnavailable, SessionClosed, SessionLost, TurnConflict
from handlers.journal.event import DamagedRecord, EventTooLarge
from handlers.journal.journal import EventTaken, JournalClosed, explain_failure
from handlers.worker.counters import Counters
from torchmoor.wire.session_ids import session_hash

logger = logging.getLogger(__name__)
CONFLICT = "another request has changed the conversation meanwhile; send this again"


class JournalFailures:
    """Translates failures, counts them, and ends sessions whose journals are damaged.

    Such a session is lost: it ends in this worker's memory, and its requests get SessionLost.
    """

    def __init__(self, store: SessionStore, counters: Counters) -> None:
        self._store = store
        self._counters = counters

    @contextmanager
    def translated(self, session_id: str) -> Iterator[None]:
        """Translate the failures of an operation on a session's journal; "" for an operation on all sessions."""
        try:
            yield
        except EventTaken as exc:
            raise TurnConflict(CONFLICT) from exc
        except JournalClosed as exc:
            raise SessionClosed() from exc
        except EventTooLarge as exc:
            raise InvalidRequest(str(exc)) from exc
        except DamagedRecord as exc:
            raise self.lose(session_id, exc) from exc
        except (OSError, ValueError) as exc:
            self._counters.add("journal_failures")
            logger.error("journal failed error=%s", exc)
            raise JournalUnavailable(explain_failure(exc)) from exc

    def lose(self, session_id: str, reason: object) -> SessionLost:
        """End a session whose journal is damaged. Return the error for its requests."""
        logger.warning("journal damaged session=%s reason=%s", session_hash(session_id), reason)
        self._counters.add("sessions_damaged")
        error = SessionLost(SessionLost.damaged_text)
        self._store.lose(session_id, error)
        return error
