"""What all journals of this package share: their settings, the form of their events, and their budget."""

from collections.abc import Mapping

from handlers.journal.budget import Budget
from handlers.journal.codec import EventCodec
from handlers.settings.journal import JournalSettings


class StoredJournal:
    """keys: see EventCodec. max_bytes: limit of the whole store; 0 if only shares of it are limited."""

    def __init__(self, settings: JournalSettings, keys: Mapping[str, bytes], max_bytes: int = 0) -> None:
        self._settings = settings
        self._codec = EventCodec(settings, keys)
        self._budget = Budget(settings, max_bytes=max_bytes)

    @property
    def used_bytes(self) -> int:
        return self._budget.used_bytes

    @property
    def num_sessions(self) -> int:
        return self._budget.num_sessions

    def check_room(self, owner: str) -> None:
        self._budget.check(owner)
