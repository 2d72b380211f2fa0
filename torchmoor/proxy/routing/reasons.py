"""Reasons of routing decisions: each has a name for headers and metrics, and a phrase for people.

The reasons of a strategy are in its own module.
"""

SENTENCES: dict[str, str] = {}  # by name; the dashboard and the chat page put "chosen because" before them


def add_reason(name: str, sentence: str) -> str:
    """Add a reason to SENTENCES and return its name."""
    SENTENCES[name] = sentence
    return name


SESSION = add_reason("session", "it holds this session")
SESSION_FAILOVER = add_reason(
    "session-failover", "the session's own instance is not available; this one continues from the journal"
)
SESSION_ROOM = add_reason("session-room", "it has the most room for new sessions")
AFFINITY = add_reason("affinity", "it has had requests with this affinity key")
AFFINITY_OVERFLOW = add_reason("affinity-overflow", "the one that has had requests with this affinity key is busy")
MODEL_RESIDENT = add_reason("model-resident", "it has the model in memory")
MODEL_LOADING = add_reason("model-loading", "it is loading the model for another request")
MODEL_UNPACKED = add_reason("model-unpacked", "it has the model on its disk")
MODEL_COLD = add_reason("model-cold", "no instance has the model; this one is the least busy")
MODEL_COPY = add_reason("model-copy", "those that have the model are too busy; this one loads it too")
RETRY = add_reason("retry", "another instance failed, and the request was sent here")
