"""Account of what each caller uses: its share is limited, and a lease returns what it took.

A caller is the principal of a verified key or token; without keys, the client's address. For the event loop's thread
only. With several processes each counts the requests on its own connections.
"""

from __future__ import annotations

from collections import Counter

from torchmoor.config.limits import CallerSettings
from torchmoor.errors import CallerLimited
from torchmoor.proxy.access.unverified import source_of


class CallerLease:
    """One request in flight, until it is released."""

    __slots__ = ("caller", "_callers")

    def __init__(self, callers: Callers, caller: str) -> None:
        self.caller = caller
        self._callers: Callers | None = callers

    def release(self) -> None:
        """Return the request's share; further calls do nothing."""
        callers, self._callers = self._callers, None
        if callers is not None:
            callers.end_request(self.caller)


class Callers:
    """The account of all callers.

    num_requests: in flight, by caller. num_refused: requests refused since the start, by the setting that limits them.
    """

    def __init__(self, settings: CallerSettings) -> None:
        self.num_requests: Counter[str] = Counter()
        self.num_refused: Counter[str] = Counter()
        self._settings = settings

    def lease_request(self, principal: str, address: str) -> CallerLease:
        """Count a request of a verified principal, or of an address without one. Raises CallerLimited."""
        caller, limit = caller_of(principal, address), self._settings.max_requests
        if self.num_requests[caller] >= limit:
            raise self.refuse(f"{limit} requests in flight", "max_requests", limit)
        self.num_requests[caller] += 1
        return CallerLease(self, caller)

    def end_request(self, caller: str) -> None:
        """Stop counting a request; called by its lease."""
        self.num_requests[caller] -= 1
        if not self.num_requests[caller]:
            del self.num_requests[caller]

    def refuse(self, used: str, setting: str, limit: int) -> CallerLimited:
        """Count a refusal and make its error."""
        self.num_refused[setting] += 1
        return CallerLimited(used, setting, limit)


def caller_of(principal: str, address: str) -> str:
    """Return the name that a request counts under."""
    return principal or source_of(address)
