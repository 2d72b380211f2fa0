"""Sessions that ended recently, and what their requests are answered."""

from collections import OrderedDict
from dataclasses import dataclass

from handlers.errors import SessionExpired, SessionGone, SessionLost, SessionUnknown
from handlers.settings.session import ChatSessionSettings
from torchmoor.wire.session_ids import SessionId


@dataclass(frozen=True, slots=True)
class _Tombstone:
    error: type[SessionGone]
    forget_at: float  # until then requests get `error`, afterwards the id is unknown
    keep_until: float  # at least until the id itself expires, so that the session does not look lost


class Tombstones:
    """Sessions that ended recently, with the reason. Not thread-safe: the store's lock guards it."""

    def __init__(self, settings: ChatSessionSettings) -> None:
        self._settings = settings
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tombstones)

    def add(self, sid: SessionId, error: type[SessionGone], now: float) -> SessionGone:
        """Remember that a session ended. Return the error that its requests get.

        An expired session needs no tombstone, because its id contains the expiry; if the clock was wrong, it continues.
        """
        if error is SessionExpired and sid.expires_at <= now:
            return error()
        forget_at = now + self._settings.tombstone_s
        keep_until = max(forget_at, sid.expires_at + self._settings.tombstone_s)
        self._tombstones[sid.text] = _Tombstone(error, forget_at, keep_until)
        return error()

    def why_gone(self, sid: SessionId, now: float) -> SessionGone:
        """Return the error for a verified id whose session is not open here."""
        tombstone = self._tombstones.get(sid.text)
        if tombstone is not None and tombstone.forget_at > now:
            return tombstone.error()
        if tombstone is None and sid.expires_at > now:
            return SessionLost()
        if tombstone is None and sid.expires_at + self._settings.tombstone_s > now:
            return SessionExpired()
        return SessionUnknown()

    def forget_old(self, now: float) -> None:
        """Remove the tombstones whose time is over, and the oldest of too many."""
        while self._tombstones:
            text, oldest = next(iter(self._tombstones.items()))
            if oldest.keep_until > now and len(self._tombstones) <= self._settings.max_tombstones:
                break
            del self._tombstones[text]
