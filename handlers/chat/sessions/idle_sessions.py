"""The idle sessions, in the order in which a full worker evicts them."""

from collections import OrderedDict
from collections.abc import Callable

from handlers.chat.sessions.session import Session


class IdleSessions:
    """Sessions that no request uses and that are not pinned, in the order of their last use.

    Not thread-safe: the store's lock guards it.
    """

    def __init__(self) -> None:
        self._sessions: OrderedDict[Session, None] = OrderedDict()

    def __contains__(self, session: Session) -> bool:
        return session in self._sessions

    def add(self, session: Session) -> None:
        """Add a session as the most recently used one."""
        self._sessions[session] = None
        self._sessions.move_to_end(session)

    def remove(self, session: Session) -> None:
        """Remove a session, if it is there."""
        self._sessions.pop(session, None)

    def first(self) -> Session | None:
        """Return the session to evict first, the least recently used one; None without idle sessions."""
        return next(iter(self._sessions), None)

    def check_integrity(self, is_held: Callable[[Session], bool]) -> None:
        """Raise RuntimeError unless each session is held and not in use."""
        for session in self._sessions:
            if session.is_busy or not is_held(session):
                raise RuntimeError("a session may be evicted that is in use or not held")
