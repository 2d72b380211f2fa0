"""The session of a request: verified by the id's MAC, or known because it was opened here.

An id from a handler that is not torchmoor's has no MAC and names no instance. So a proxy knows only those sessions of
such handlers that were opened through it, and no other instance can take one over.

For the event loop's thread only. Does not select instances.
"""

from __future__ import annotations

import json

from torchmoor.config.sessions import SessionIdSettings
from torchmoor.errors import ValidationError
from torchmoor.proxy.dispatch.api_member import SESSION_ID_MEMBER
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.proxy.instances.instance import Instance
from torchmoor.wire import headers
from torchmoor.wire.last_kept import LastKept
from torchmoor.wire.session_ids import SessionId, find_key, verify

NEW_SESSION = headers.NEW_SESSION.encode()
SESSION_KEY = b'"session_id"'  # in the body of a turn that has no header for it
MAX_REMEMBERED_IDS = 4096


class RequestSessions:
    """Finds the session of a request of any dialect. Remembers ids that it has verified.

    max_foreign_sessions: how many sessions whose ids have no MAC it remembers, the last used ones.
    """

    def __init__(self, settings: SessionIdSettings, max_foreign_sessions: int) -> None:
        self._keys = settings.keys
        self._foreign: LastKept[tuple[str, str, str], SessionId] = LastKept(max_foreign_sessions)
        self._verified: LastKept[tuple[str, str, bytes], SessionId] = LastKept(MAX_REMEMBERED_IDS)

    def get(self, endpoint: Endpoint, principal: str, raw: bytes | None) -> SessionId | None:
        """Return the session that a request belongs to; None if it has none or opens one.

        Raises ValidationError for an id that breaks the pattern, or was neither made for this endpoint and principal
        with a known key nor seen here when another handler opened a session with it.
        """
        if not raw or raw == NEW_SESSION:
            return None
        known = self.find_verified(endpoint, principal, raw)
        if known is not None:
            return known
        SESSION_ID_MEMBER.check(raw)
        text = raw.decode("ascii")
        session = verify(text, self._keys, endpoint=endpoint.name, principal=principal)
        if session is not None:
            self._verified.keep((endpoint.name, principal, raw), session)
            return session
        key = (endpoint.name, principal, text)
        session = self._foreign.get(key)
        if session is None:
            raise ValidationError("The session id is not valid: it was not issued by this endpoint.")
        self._foreign.keep(key, session)  # now the last used one
        return session

    def find_verified(self, endpoint: Endpoint, principal: str, raw: bytes) -> SessionId | None:
        """Return the session of an id that was verified before, and is remembered."""
        return self._verified.get((endpoint.name, principal, raw))

    def is_lost(self, endpoint: Endpoint, principal: str, session_id: str) -> bool:
        """Return True if the session's id is signed with another key of a known name and can never be verified.

        `torchmoor up` makes a key at each start, unless TORCHMOOR_SESSION_KEYS has one.
        """
        if find_key(session_id, self._keys) is None:
            return False
        try:
            return self.get(endpoint, principal, session_id.encode()) is None
        except ValidationError:
            return True

    def find_in_body(self, endpoint: Endpoint, principal: str, body: bytes) -> SessionId | None:
        """Return the session that a JSON body names, if it belongs to this endpoint and principal.

        A malformed body or id is ignored here: the instance answers with the error.
        """
        try:
            content = json.loads(body)
            named = content.get("session_id") if isinstance(content, dict) else None
            return self.get(endpoint, principal, named.encode("ascii")) if isinstance(named, str) else None
        except (ValueError, RecursionError, ValidationError):
            return None

    def on_opened(self, endpoint: Endpoint, principal: str, raw: bytes, instance: Instance) -> SessionId | None:
        """Remember the id of a session that an instance has opened, if the id has no MAC.

        raw: `<id>; Expires=...`. Returns None if no client could send the id.
        """
        text = raw.partition(b";")[0].strip()
        try:
            SESSION_ID_MEMBER.check(text)
        except ValidationError:
            return None
        if text == NEW_SESSION:
            return None
        session_id = text.decode("ascii")
        session = verify(session_id, self._keys, endpoint=endpoint.name, principal=principal)
        if session is None:
            session = SessionId(session_id, instance.name, expires_at=0, key_id="")
            self._foreign.keep((endpoint.name, principal, session_id), session)
        return session

    def on_closed(self, endpoint: Endpoint, principal: str, session: SessionId) -> None:
        if session.is_foreign:
            self._foreign.pop((endpoint.name, principal, session.text), None)
