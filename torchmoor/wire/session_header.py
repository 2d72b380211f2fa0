"""The header of an answer that opens a session: the session's id, and when it expires."""

from calendar import timegm
from time import gmtime, strftime, strptime

_EXPIRES_FORM = "%Y-%m-%dT%H:%M:%SZ"


def write_session_header(session_id: str, expires_at: float) -> str:
    """Return the header's value, `<id>; Expires=...`. expires_at: seconds since 1970."""
    return f"{session_id}; Expires={strftime(_EXPIRES_FORM, gmtime(expires_at))}"


def read_expiry(raw: bytes) -> float | None:
    """Return when a session expires, in seconds since 1970; None if the header does not say so."""
    _, _, text = raw.partition(b"Expires=")
    try:
        return timegm(strptime(text.strip().decode("ascii"), _EXPIRES_FORM))
    except ValueError:
        return None
