"""Operations of a handler, named in the header `x-torchmoor-operation`, and the keys of their bodies."""

# Names
CANCEL = "cancel"
END_CLOSED = "end-closed"
IN_FLIGHT = "in-flight"
MODELS = "models"
SESSIONS = "sessions"
STATUS = "status"

# Keys of cancel and in-flight
REQUEST_IDS = "request_ids"
NUM_CANCELLED = "cancelled"
NUM_IN_FLIGHT = "in_flight"
MAX_CANCELLED = 1000  # ids in one cancel operation

# Keys of end-closed
SESSION_IDS = "session_ids"
NUM_ENDED = "ended"
MAX_ENDED = 1000  # ids in one operation

# Actions of sessions
CLOSE, PIN, UNPIN = "close", "pin", "unpin"
SESSION_ACTIONS = (CLOSE, PIN, UNPIN)
IN_JOURNAL = "in_journal"  # with close: a session that no worker holds
MAX_SESSIONS = 1000  # in one page
