"""Limits for each caller: its requests in flight and its open sessions are counted by leases.

A caller is the principal of a verified key or token; without keys, the client's address. For the event loop's thread
only. With several processes, each counts the requests of its own connections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from math import ceil

from torchmoor.async_inference.request import CallerShare
from torchmoor.config.callers import CallerSettings
from torchmoor.errors import BUSY_RETRY_S, CallerLimited
from torchmoor.proxy.dispatch.caller_sessions import CallerSessions
from torchmoor.proxy.http.arriving import source_of
from torchmoor.proxy.http.message import Request
from torchmoor.wire import headers

SESSION_LIMIT_LINE = f"{headers.SESSION_LIMIT}: reached\r\n".encode()
SOURCE_LINE = f"{headers.SOURCE}: %b\r\n".encode()


class CallerLease:
    """One request in flight, and the session that it opens, until it is released."""

    __slots__ = ("caller", "_invocation_id", "_callers", "_opens_session")

    def __init__(self, callers: Callers, caller: str, invocation_id: bytes, *, opens_session: bool) -> None:
        self.caller = caller
        self._invocation_id = invocation_id
        self._callers: Callers | None = callers
        self._opens_session = opens_session

    def release(self) -> None:
        """Stop counting the request; further calls of any method do nothing."""
        callers, self._callers = self._callers, None
        if callers is not None:
            callers.end_request(self.caller)
            self._end_opening(callers)

    def _end_opening(self, callers: Callers) -> None:
        if self._opens_session:
            self._opens_session = False
            callers.sessions.end_opening(self.caller)

    def header_lines(self, request: Request, *, opens_session: bool) -> bytes:
        """Return the header lines about the caller: its address, if it has no principal, and its session limit.

        Only the instance can see whether the request's body opens one.
        """
        source_line = b"" if request.principal else SOURCE_LINE % self.caller.encode()
        return source_line if opens_session or not self.has_all_sessions else source_line + SESSION_LIMIT_LINE

    @property
    def has_all_sessions(self) -> bool:
        """True if the caller may not open another session."""
        return self._callers is not None and self._callers.sessions.is_full(self.caller, self._invocation_id)

    def refuse_session(self) -> CallerLimited:
        """Count an opening that an instance has refused for the limit, and make its error."""
        assert self._callers is not None
        return self._callers.limit_sessions(self.caller)

    def on_opened(self, key: Hashable, *, expires_at: float, last_at: float) -> None:
        """Count a session that the request has opened; see CallerSessions.opened."""
        if self._callers is not None:
            self._end_opening(self._callers)
            self._callers.sessions.opened(
                self.caller, key, expires_at=expires_at, last_at=last_at, invocation_id=self._invocation_id
            )

    def on_turn(self, key: Hashable, *, is_lost: bool) -> None:
        """Note the answer to a session's turn. is_lost: its instance no longer has the session."""
        if self._callers is not None:
            sessions = self._callers.sessions
            (sessions.lost if is_lost else sessions.used)(self.caller, key)

    def on_closed(self, key: Hashable, expires_at: float) -> None:
        """Stop counting a session, which expires at that time at the latest."""
        if self._callers is not None:
            self._callers.sessions.closed(self.caller, key, expires_at=expires_at)


class Callers:
    """The counts and limits of all callers.

    num_requests: in flight, by caller. sessions: open ones. num_refused: requests refused since the start, by the
    setting that limits them.
    """

    def __init__(self, settings: CallerSettings, *, wall: Callable[[], float]) -> None:
        """wall: seconds since 1970."""
        self.num_requests: dict[str, int] = {}
        self.sessions = CallerSessions(settings.max_sessions, wall=wall)
        self.num_refused: Counter[str] = Counter()
        self._settings = settings

    def lease_request(
        self, principal: str, address: str, *, opens_session: bool = False, invocation_id: bytes = b""
    ) -> CallerLease:
        """Count a request of a verified principal, or of an address without one. Raises CallerLimited.

        invocation_id: the same for all attempts of a client to open one session.
        """
        caller, most = principal or source_of(address), self._settings.max_requests
        if not self.has_room(caller):
            self.num_refused["max_requests"] += 1
            raise CallerLimited(f"{most} requests in flight", "max_requests", most)
        if opens_session and not self.sessions.try_begin_opening(caller, invocation_id):
            raise self.limit_sessions(caller)
        self.num_requests[caller] = self.num_requests.get(caller, 0) + 1
        return CallerLease(self, caller, invocation_id, opens_session=opens_session)

    def has_room(self, caller: str) -> bool:
        """Return True if a caller may send another request now."""
        return self.num_requests.get(caller, 0) < self._settings.max_requests

    def async_share(self, caller: str) -> CallerShare:
        """Return what a caller may have pending in the queue of asynchronous requests."""
        return CallerShare(caller, self._settings.max_async_requests, self._settings.max_async_bytes)

    def limit_sessions(self, caller: str) -> CallerLimited:
        """Count a refused opening and make its error."""
        self.num_refused["max_sessions"] += 1
        count, left_s = self.sessions.count(caller), self.sessions.first_expiry_s(caller)
        return CallerLimited(
            f"{count} open sessions",
            "max_sessions",
            self._settings.max_sessions,
            retry_after_s=BUSY_RETRY_S if left_s is None else max(BUSY_RETRY_S, ceil(left_s)),
            remedy="Close one",
        )

    def end_request(self, caller: str) -> None:
        """Stop counting a request; called by its lease."""
        num_requests = self.num_requests.pop(caller) - 1
        if num_requests:
            self.num_requests[caller] = num_requests
