"""The expiry of sessions: the thread that ends them, and the memory of those that ended."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from handlers.errors import SessionClosed, SessionExpired, SessionGone, SessionLost, SessionUnknown
from handlers.settings import ChatSessionSettings
from torchmoor.wire.session_ids import SessionId

logger = logging.getLogger(__name__)
INTERVAL_S = 1.0
SWEEP_INTERVAL_S = 600.0  # between two searches for journals of expired sessions


class ExpiryThread:
    """Calls `expire` every second, and every ten minutes `sweep` for journals that expired before a time.

    wall: seconds since 1970.
    """

    def __init__(
        self, expire: Callable[[], None], sweep: Callable[[int], None], tombstone_s: int, wall: Callable[[], float]
    ) -> None:
        self._expire = expire
        self._sweep = sweep
        self._tombstone_s = tombstone_s
        self._wall = wall
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="expiry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        next_sweep = 0.0
        while not self._stopping.wait(INTERVAL_S):
            try:
                self._expire()
                if self._wall() >= next_sweep:
                    next_sweep = self._wall() + SWEEP_INTERVAL_S
                    self._sweep(int(self._wall() - self._tombstone_s))
            except Exception:
                logger.exception("sessions could not be expired")


@dataclass(frozen=True, slots=True)
class _Tombstone:
    error: type[SessionGone]
    forget_at: float  # until then the id is answered with `error`, afterwards it is unknown
    keep_until: float  # until the id itself has expired it must not look lost


class Tombstones:
    """The sessions that ended a short time ago, and why. Not thread-safe: the store's lock guards it."""

    def __init__(self, settings: ChatSessionSettings) -> None:
        self._settings = settings
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tombstones)

    def add(self, sid: SessionId, error: type[SessionGone], now: float) -> SessionGone:
        """Remember that a session ended. Return the error that its requests get."""
        forget_at = now + self._settings.tombstone_s
        keep_until = max(forget_at, sid.expires_at + self._settings.tombstone_s)
        self._tombstones[sid.text] = _Tombstone(error, forget_at, keep_until)
        return _gone(error)

    def why_gone(self, sid: SessionId, now: float) -> SessionGone:
        """Return the error for a verified id whose session is not open here."""
        tombstone = self._tombstones.get(sid.text)
        if tombstone is not None and tombstone.forget_at > now:
            return _gone(tombstone.error)
        if tombstone is None and sid.expires_at > now:
            return lost()
        if tombstone is None and sid.expires_at + self._settings.tombstone_s > now:
            return _gone(SessionExpired)
        return SessionUnknown("no session of this id is known any more; open one with a start_session request")

    def forget_old(self, now: float) -> None:
        """Remove the tombstones whose time is over, and the oldest of too many."""
        while self._tombstones:
            text, oldest = next(iter(self._tombstones.items()))
            if oldest.keep_until > now and len(self._tombstones) <= self._settings.max_tombstones:
                break
            del self._tombstones[text]


def lost() -> SessionLost:
    """Return the error for a session that is not over and not in this worker's memory."""
    return SessionLost("this session's memory is gone, because its worker was restarted or replaced; open a new one")


def _gone(error: type[SessionGone]) -> SessionGone:
    if error is SessionClosed:
        return SessionClosed("this session was closed; open a new one")
    return SessionExpired("this session has expired; open a new one")
