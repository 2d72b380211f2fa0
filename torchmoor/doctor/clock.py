"""Checks of this machine's clock, whose time is in signatures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from urllib.error import HTTPError

from torchmoor.clients.local import make_opener
from torchmoor.config.access import AccessSettings
from torchmoor.doctor.finding import Finding, FleetPlan, Level, ok

TIMEOUT_S = 3.0
MAX_SKEW_S = AccessSettings().clock_skew_s  # the most by which a signature's time may differ, at AWS and in the proxy


def check_fleet_clock(plan: FleetPlan) -> Iterator[Finding]:
    """Compare the proxy's clock with this machine's, which signs the requests."""
    for url in (f"{plan.admin_url.rstrip('/')}/healthz", f"{plan.url.rstrip('/')}/ping"):
        try:
            with make_opener(url).open(url, timeout=TIMEOUT_S) as answer:
                date = answer.headers.get("Date")
        except HTTPError as error:
            with error:
                date = error.headers.get("Date")
        except (OSError, HTTPException, ValueError):
            continue
        if date is not None:
            yield from check_clock(date, url)
            return


def check_clock(date: str | None, whose: str, now: float | None = None) -> Iterator[Finding]:
    """Compare this clock with a server's, because signatures contain the time. date: the server's HTTP date."""
    try:
        skew_s = (time.time() if now is None else now) - parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError):
        return
    if abs(skew_s) <= MAX_SKEW_S / 2:
        yield ok("clock", f"within {max(abs(skew_s), 1):.0f} s of that of {whose}")
        return
    found = f"this clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} that of {whose}"
    remedy = f"signatures are refused beyond {MAX_SKEW_S:.0f} s: run chrony or systemd-timesyncd"
    yield Finding(Level.PROBLEM if abs(skew_s) > MAX_SKEW_S else Level.WARNING, "clock", found, remedy)
