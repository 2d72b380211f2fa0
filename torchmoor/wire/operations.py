"""Operations of a handler, named in the header `x-torchmoor-operation`, and the keys of their bodies."""

# Names
CANCEL = "cancel"
END_CLOSED = "end-closed"
IN_FLIGHT = "in-flight"
MODELS = "models"
SESSIONS = "sessions"
STATUS = "status"

# Questions that a request may ask about a model instead of using it; the model is loaded first
METADATA, READY = "metadata", "ready"
MODEL_QUESTIONS = (METADATA, READY)

# Keys of cancel and in-flight
REQUEST_IDS = "request_ids"
NUM_CANCELLED = "cancelled"
NUM_IN_FLIGHT = "in_flight"
MAX_CANCELLED = 1000  # ids in one cancel operation

# Keys of end-closed
SESSION_IDS = "session_ids"
NUM_ENDED = "ended"
MAX_ENDED = 1000  # ids in one operation

# Keys of models, and its actions. URL goes with LOAD only
ACTION = "action"
MODEL = "model"
URL = "url"
LOAD, UNLOAD, PREWARM, PIN, UNPIN = "load", "unload", "prewarm", "pin", "unpin"
MODEL_ACTIONS = (LOAD, UNLOAD, PIN, UNPIN, PREWARM)

# Keys of sessions with an action, and the actions; session_query.py has the keys of a list
SESSION = "session"  # its hash
IN_JOURNAL = "in_journal"  # with close: a session that no worker holds
ENTRY = "entry"  # with close: only the response in the background of this number, in a conversation
CLOSE = "close"
SESSION_ACTIONS = (CLOSE, PIN, UNPIN)
