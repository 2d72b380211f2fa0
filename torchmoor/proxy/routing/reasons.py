"""Reasons of routing decisions: the names on the wire, and a sentence for people beside each."""

SESSION = "session"
SESSION_FAILOVER = "session-failover"
SESSION_ROOM = "session-room"
LEAST_OUTSTANDING = "least-outstanding-requests"
RANDOM = "random"
PREFIX_AWARE = "prefix-aware"
PREFIX_AWARE_OVERFLOW = "prefix-aware-overflow"
KV_AWARE = "kv-aware"
AFFINITY = "affinity"
AFFINITY_OVERFLOW = "affinity-overflow"
MODEL_RESIDENT = "model-resident"
MODEL_LOADING = "model-loading"
MODEL_UNPACKED = "model-unpacked"
MODEL_COLD = "model-cold"
MODEL_COPY = "model-copy"
RETRY = "retry"

# The dashboard and the chat page show these; each completes "chosen because".
SENTENCES = {
    SESSION: "it holds this session",
    SESSION_FAILOVER: "the session's own instance is away; this one goes on from the journal",
    SESSION_ROOM: "it has the most room for new sessions",
    LEAST_OUTSTANDING: "it has the fewest requests running",
    RANDOM: "by chance, as configured",
    PREFIX_AWARE: "it has had requests that begin alike",
    PREFIX_AWARE_OVERFLOW: "the one that has seen this beginning is full",
    KV_AWARE: "it has most of the prompt's beginning in its cache",
    AFFINITY: "it has had requests with this affinity key",
    AFFINITY_OVERFLOW: "the one that has had requests with this affinity key is busy",
    MODEL_RESIDENT: "it has the model in memory",
    MODEL_LOADING: "it is loading the model for another request",
    MODEL_UNPACKED: "it has the model on its disk",
    MODEL_COLD: "no instance has the model; this one is the least busy",
    MODEL_COPY: "those that have the model are too busy; this one loads it too",
    RETRY: "another instance failed, and the request was sent here",
}
