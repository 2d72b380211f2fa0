"""Refusal of requests that a web page of another site may have sent through a local user's browser.

Pages of listen.allowed_origins are served; cors.py lets them read the answers.

A listener on loopback needs no credentials, and every page in a browser of this machine can send it requests: as
another origin, or through a name of the page's own site that resolves to this address (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from torchmoor.errors import ConfigError, SourceRefused
from torchmoor.proxy.access.exposure import is_loopback
from torchmoor.proxy.http.message import Request

ORIGIN, SITE = b"origin", b"sec-fetch-site"
FOREIGN_SITES = frozenset((b"cross-site", b"same-site"))
MAX_SHOWN = 256
MAX_KEPT = 64  # values of Host that were accepted


class WebPageGuard:
    """Decides whether a Host names a listener, and whether an Origin belongs to one of its pages.

    host: the listener's address. allowed: names besides those of loopback, and hosts of other pages that may call it.
    origins: of pages that may call it themselves; None if its pages only may.
    """

    def __init__(self, host: str, allowed: Sequence[str], origins: Collection[str] | None = None) -> None:
        self._allowed = frozenset(name.lower().strip("[]") for name in allowed)
        self._origins = origins
        self._own: set[bytes] = set()
        self.is_on = bool(allowed) or is_loopback(host)

    def knows(self, host: bytes) -> bool:
        """Return whether this Host was accepted before, and is remembered."""
        return host in self._own

    def check(self, request: Request, *, is_open: bool) -> None:
        """Raise SourceRefused if a page of another site may have sent the request.

        is_open: links from other sites may lead to this path.
        """
        host = request.host
        if host not in self._own:
            self._check_host(host)
        if request.find(ORIGIN) is not None:
            self.check_origin(request)
        elif not is_open and request.find(SITE) in FOREIGN_SITES:
            raise SourceRefused("A page of another site may not do this.")

    def check_origin(self, request: Request) -> None:
        """Raise SourceRefused if the request is from a page of another origin that is not allowed."""
        found = request.find(ORIGIN)
        if found is None:
            return
        origin = found.decode("latin-1")
        if is_own_origin(origin, request.host.decode("latin-1"), self._allowed) or origin in (self._origins or ()):
            return
        refused = f"A page of {origin[:MAX_SHOWN]} may not do this."
        if self._origins is None:
            raise SourceRefused(refused)
        raise SourceRefused(
            f"{refused} Add its origin to listen.allowed_origins (--allow-origin). Or let its own web server pass the "
            "requests on, and add the page's host to listen.allowed_hosts (--allow-host)."
        )

    def is_own_host(self, host: str) -> bool:
        """Return whether a Host is a name or address of loopback, or is allowed, with any port."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            return name in self._allowed or name.endswith(".localhost") or is_loopback(name)
        except (ConfigError, ValueError):
            return False

    def _check_host(self, host: bytes) -> None:
        text = host.decode("latin-1")
        if host and not self.is_own_host(text):  # a client that is not a browser: every browser sends a Host
            raise SourceRefused(
                f"This server is not called {text[:MAX_SHOWN]!r}: use its address, or add the name to "
                "listen.allowed_hosts (--allow-host)."
            )
        if len(self._own) < MAX_KEPT:
            self._own.add(host)


def is_own_origin(origin: str, host: str, allowed: Collection[str] = ()) -> bool:
    """Return whether an Origin is that of a page of this Host, or of an allowed one."""
    try:
        parts = urlsplit(origin)
        return parts.netloc.lower() == host.lower() or parts.hostname in allowed
    except ValueError:
        return False
