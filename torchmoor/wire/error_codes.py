"""Error codes on the wire: names of classes of handlers/errors.py, and what the proxy does about each.

A set below has the codes that the proxy treats alike. A code in none of them is an error of the model.
"""

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

# The session cannot be continued anywhere.
SESSION_ENDED = frozenset((SESSION_CLOSED, SESSION_EXPIRED, SESSION_LOST, SESSION_UNKNOWN))

# The request is at fault: the runtime API answers with its ValidationError.
REQUEST_AT_FAULT = SESSION_ENDED | {SESSION_ID_MISMATCH, MODEL_UNKNOWN, NOT_ACCEPTABLE}

# The caller uses as much as it may: the runtime API answers with its ThrottlingException.
CALLER_AT_LIMIT = frozenset((CALLER_BUDGET_REACHED,))

# The instance refuses the request for now; another instance, or the same one later, may serve it.
REFUSED_FOR_NOW = frozenset(
    (OVERLOADED, OUT_OF_MEMORY, OUT_OF_DISK, JOURNAL_UNAVAILABLE, SOURCE_UNAVAILABLE, LOAD_STOPPED)
)

# An asynchronous request that is refused so is tried again, which does not count as an attempt.
REFUSED_UNCOUNTED = REFUSED_FOR_NOW | {MODEL_LOADING}

# The instance does not have the model that was asked for, although it may have been loading it.
MODEL_NOT_LOADED = frozenset((MODEL_UNKNOWN, MODEL_BROKEN, LOAD_TIMED_OUT, OUT_OF_MEMORY, OUT_OF_DISK))
