"""Codes of a handler's errors by which the proxy decides: each is the name of a class of handlers/errors.py."""

INVALID_REQUEST = "InvalidRequest"
JOURNAL_UNAVAILABLE = "JournalUnavailable"
OUT_OF_DISK = "OutOfDisk"
OUT_OF_MEMORY = "OutOfMemory"
OVERLOADED = "Overloaded"

SESSION_CLOSED = "SessionClosed"
SESSION_EXPIRED = "SessionExpired"
SESSION_ID_MISMATCH = "SessionIdMismatch"
SESSION_LOST = "SessionLost"
SESSION_UNKNOWN = "SessionUnknown"

LOAD_STOPPED = "LoadStopped"
LOAD_TIMED_OUT = "LoadTimedOut"
MODEL_BROKEN = "ModelBroken"
MODEL_LOADING = "ModelLoading"
MODEL_UNKNOWN = "ModelUnknown"
SOURCE_UNAVAILABLE = "SourceUnavailable"

# The instance refuses the request for now; another instance, or the same one later, may serve it.
REFUSED_FOR_NOW = frozenset(
    (OVERLOADED, OUT_OF_MEMORY, OUT_OF_DISK, JOURNAL_UNAVAILABLE, SOURCE_UNAVAILABLE, LOAD_STOPPED)
)
