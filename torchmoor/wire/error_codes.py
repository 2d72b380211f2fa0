"""Error codes on the wire: names of classes of handlers/errors.py, by which the proxy decides, and a stream's own."""

CALLER_BUDGET_REACHED = "CallerBudgetReached"
INVALID_REQUEST = "InvalidRequest"
NOT_ACCEPTABLE = "NotAcceptable"
JOURNAL_UNAVAILABLE = "JournalUnavailable"
OUT_OF_DISK = "OutOfDisk"
OUT_OF_MEMORY = "OutOfMemory"
OVERLOADED = "Overloaded"

SESSION_CLOSED = "SessionClosed"
SESSION_EXPIRED = "SessionExpired"
SESSION_ID_MISMATCH = "SessionIdMismatch"
SESSION_LIMIT_REACHED = "SessionLimitReached"
SESSION_LOST = "SessionLost"
SESSION_UNKNOWN = "SessionUnknown"

LOAD_STOPPED = "LoadStopped"
LOAD_TIMED_OUT = "LoadTimedOut"
MODEL_BROKEN = "ModelBroken"
MODEL_LOADING = "ModelLoading"
MODEL_UNKNOWN = "ModelUnknown"
SOURCE_UNAVAILABLE = "SourceUnavailable"

# Codes of a stream that ends early. The proxy makes them, and boto3 drops them, so each error's message names its code.
STREAM_TIMED_OUT = "ModelInvocationTimeExceeded"
STREAM_BROKEN = "StreamBroken"
STREAM_CODES = (STREAM_TIMED_OUT, STREAM_BROKEN)

# The instance refuses the request for now; another instance, or the same one later, may serve it.
REFUSED_FOR_NOW = frozenset(
    (OVERLOADED, OUT_OF_MEMORY, OUT_OF_DISK, JOURNAL_UNAVAILABLE, SOURCE_UNAVAILABLE, LOAD_STOPPED)
)
