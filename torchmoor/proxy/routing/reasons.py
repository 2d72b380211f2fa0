"""Reasons of routing decisions: each a name on the wire, and a sentence for people."""

SENTENCES: dict[str, str] = {}  # by name; the dashboard and the chat page put "chosen because" before them


def _reason(name: str, sentence: str) -> str:
    SENTENCES[name] = sentence
    return name


SESSION = _reason("session", "it holds this session")
SESSION_FAILOVER = _reason("session-failover", "the session's own instance is away; this one goes on from the journal")
SESSION_ROOM = _reason("session-room", "it has the most room for new sessions")
LEAST_OUTSTANDING = _reason("least-outstanding-requests", "it has the fewest requests running")
RANDOM = _reason("random", "by chance, as configured")
PREFIX_AWARE = _reason("prefix-aware", "it has had requests that begin alike")
PREFIX_AWARE_OVERFLOW = _reason("prefix-aware-overflow", "the one that has seen this beginning is full")
KV_AWARE = _reason("kv-aware", "it has most of the prompt's beginning in its cache")
AFFINITY = _reason("affinity", "it has had requests with this affinity key")
AFFINITY_OVERFLOW = _reason("affinity-overflow", "the one that has had requests with this affinity key is busy")
MODEL_RESIDENT = _reason("model-resident", "it has the model in memory")
MODEL_LOADING = _reason("model-loading", "it is loading the model for another request")
MODEL_UNPACKED = _reason("model-unpacked", "it has the model on its disk")
MODEL_COLD = _reason("model-cold", "no instance has the model; this one is the least busy")
MODEL_COPY = _reason("model-copy", "those that have the model are too busy; this one loads it too")
RETRY = _reason("retry", "another instance failed, and the request was sent here")
