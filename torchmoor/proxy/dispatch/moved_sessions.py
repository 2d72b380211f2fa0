"""Sessions that more than one instance may hold, because another instance served them for some time.

The instance that answers a client's close ends the session. The others would keep its memory until it expires, so the
proxy sends them the close too. An instance reads the session's journal before it ends a session, so an open session
stays.
"""

from __future__ import annotations

import logging

from torchmoor.proxy.dispatch.id_operations import IdOperations
from torchmoor.proxy.instances.instance import SERVING, Instance
from torchmoor.proxy.instances.registry import Registry
from torchmoor.wire.last_kept import LastKept
from torchmoor.wire.session_ids import SessionId

logger = logging.getLogger(__name__)

MAX_SESSIONS = 20_000  # moved ones that are remembered
MAX_HOLDERS = 4  # of one session, besides the instance that opened it
MAX_UNSENT = 5_000  # closed sessions, over all instances that do not answer


class MovedSessions:
    """Sends a client's close to all instances that held the session. For the event loop's thread only.

    An instance that is down at the time is sent the close when it answers again. A proxy process that has not moved
    the session itself knows only the instance that opened it.
    """

    def __init__(self, registry: Registry, closings: IdOperations) -> None:
        self._registry = registry
        self._closings = closings
        self._holders: LastKept[str, tuple[str, ...]] = LastKept(MAX_SESSIONS)  # names, by session
        self._unsent: dict[str, list[str]] = {}  # sessions, by instance
        self._num_unsent = 0
        registry.listen(self._on_change)

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, session: SessionId, instance: Instance) -> None:
        """Remember that a request of the session goes to this instance, which has not opened it."""
        others = self._holders.get(session.text, ())
        names = others if instance.name in others else (*others, instance.name)
        self._holders.keep(session.text, names[-MAX_HOLDERS:])

    def on_closed(self, session: SessionId, closer: Instance) -> None:
        """Send a close that has succeeded to the other instances that may hold the session."""
        holders = {session.instance, *self._holders.pop(session.text, ())} - {closer.name}
        for name in sorted(holders):
            instance = self._registry.find(name)
            if instance is None:
                continue
            if instance.state in SERVING:
                self._send(instance, session.text)
            elif self._num_unsent < MAX_UNSENT:
                self._unsent.setdefault(name, []).append(session.text)
                self._num_unsent += 1
            else:
                logger.warning("closed session not passed on instance=%s unsent=%d", name, self._num_unsent)

    def _send(self, instance: Instance, session_id: str) -> None:
        self._closings.send(instance, b"/predictions/" + instance.model.encode(), session_id)

    def _on_change(self, instance: Instance) -> None:
        """Send the waiting closes when their instance answers again; drop them if it is removed."""
        is_known = self._registry.has(instance)
        if is_known and instance.state not in SERVING:
            return
        ids = self._unsent.pop(instance.name, [])
        self._num_unsent -= len(ids)
        if is_known:
            for session_id in ids:
                self._send(instance, session_id)
