"""Failures of a journal's store, and what clients read about them."""

import errno


class EventsMissing(OSError):
    """The store has lost events that it had confirmed."""


def explain_failure(error: Exception) -> str:
    """Return the message for a client whose request needs the journal."""
    if isinstance(error, EventsMissing):
        return "the session's journal has lost events; open a new session, or restore the journal's data"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the session's journal is full; try again later"
    return "the session's journal cannot be reached; try again later"
