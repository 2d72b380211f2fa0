"""Error codes on the wire: names of classes of handlers/errors.py, in sets that the proxy treats alike.

A code in none of the sets is an error of the model. An error answer without a code is TorchServe's own.
"""

CALLER_BUDGET_REACHED = "CallerBudgetReached"
CONTEXT_TOO_LONG = "ContextTooLong"
IMAGE_TOO_LARGE = "ImageTooLarge"
IMAGE_UNREACHABLE = "ImageUnreachable"
IMAGE_URL_FORBIDDEN = "ImageUrlForbidden"
INVALID_REQUEST = "InvalidRequest"
NOT_ACCEPTABLE = "NotAcceptable"
NOT_AN_IMAGE = "NotAnImage"
JOURNAL_UNAVAILABLE = "JournalUnavailable"
OUT_OF_DISK = "OutOfDisk"
OUT_OF_MEMORY = "OutOfMemory"
OVERLOADED = "Overloaded"
RESPONSE_CANCELLED = "ResponseCancelled"
UNSUPPORTED_MEDIA = "UnsupportedMedia"

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

# No instance can continue the session.
SESSION_ENDED = frozenset((SESSION_CLOSED, SESSION_EXPIRED, SESSION_LOST, SESSION_UNKNOWN))

# The request is wrong: the runtime API answers with its ValidationError.
REQUEST_AT_FAULT = SESSION_ENDED | {SESSION_ID_MISMATCH, MODEL_UNKNOWN, NOT_ACCEPTABLE}

# The caller has reached a limit: the runtime API answers with its ThrottlingException.
CALLER_AT_LIMIT = frozenset((CALLER_BUDGET_REACHED,))

# The instance refuses the request for now; another instance, or the same one later, may serve it.
REFUSED_FOR_NOW = frozenset(
    (OVERLOADED, OUT_OF_MEMORY, OUT_OF_DISK, JOURNAL_UNAVAILABLE, SOURCE_UNAVAILABLE, LOAD_STOPPED)
)

# The instance does not have the model that was asked for, although it may have been loading it.
MODEL_NOT_LOADED = frozenset((MODEL_UNKNOWN, MODEL_BROKEN, LOAD_TIMED_OUT, OUT_OF_MEMORY, OUT_OF_DISK))

# Statuses of answers without a code: TorchServe's queue is full or it has no worker, or the worker has died.
TORCHSERVE_BUSY = frozenset((503, 507))
# Those when a worker dies with the request, which it had perhaps begun; 500 is other handlers' own, too.
WORKER_DIED = frozenset((500, 507))
