"""JSON schemas of the bodies of the admin plane's routes."""

from __future__ import annotations

from torchmoor.proxy.api.reference.common_schemas import (
    FLAG,
    NATURAL,
    NUMBER,
    OBJECTS,
    PLAIN_ERROR,
    TEXT,
    TEXT_LIST,
    Schema,
    array,
    or_null,
    record,
)

HEALTH = record(("ok", "endpoints_without_instance"), ok=FLAG, endpoints_without_instance=TEXT_LIST)
LIVENESS = record(("ok",), ok=FLAG)
READINESS = record(("ok", "waits_for_dns"), ok=FLAG, waits_for_dns=TEXT_LIST)
INSTANCES = record(
    ("endpoints", "instances"),
    endpoints=TEXT_LIST,
    instances=array(record(("name", "state"), name=TEXT, state=TEXT)),
)
MOVED_INSTANCE = record(("name", "state", "outstanding"), name=TEXT, state=TEXT, outstanding=NATURAL)
_SERIES: Schema = {"type": "object", "additionalProperties": array(or_null(NUMBER))}
INSTANCE_HISTORY = record(("name", "series"), name=TEXT, series=_SERIES)
PLACED_MODELS = record(("models", "instances"), models=OBJECTS, instances=OBJECTS)
_RESULT = record(("instance", "status"), instance=TEXT, status=or_null(NATURAL), error=TEXT)
_RESULTS: Schema = array(_RESULT)
MODEL_ACTION = record(("model", "instances"), model=TEXT, instances=_RESULTS)
SESSIONS = record(("sessions", "next", "instances"), sessions=OBJECTS, next=or_null(TEXT), instances=OBJECTS)
SESSION_ACTION = record(("session", "action", "instances"), session=TEXT, action=TEXT, instances=_RESULTS)
ASYNC_REQUEST = record(
    ("inference_id", "endpoint", "state", "attempts", "received_at", "updated_at"),
    inference_id=TEXT,
    endpoint=TEXT,
    state=TEXT,
    attempts=NATURAL,
    instance=or_null(TEXT),
    reason=or_null(TEXT),
    received_at=NUMBER,
    updated_at=NUMBER,
    due_at=or_null(NUMBER),
    expires_at=or_null(NUMBER),
    input_location=or_null(TEXT),
    output_location=or_null(TEXT),
    failure_location=or_null(TEXT),
)
ASYNC_REQUESTS = record(
    ("endpoint", "waiting", "running", "decided", "oldest_age_s", "requests"),
    endpoint=TEXT,
    waiting=NATURAL,
    running=NATURAL,
    decided=NATURAL,
    oldest_age_s=NUMBER,
    requests=array(ASYNC_REQUEST),
)
CANCELLED_REQUEST = record(("inference_id", "state"), inference_id=TEXT, state=TEXT)
DECISIONS = record(("decisions", "left_out", "oldest"), decisions=OBJECTS, left_out=NATURAL, oldest={})
DASHBOARD = record(("version", "time", "uptime_s"), version=TEXT, time=NUMBER, uptime_s=NUMBER)
ERROR: Schema = {
    "anyOf": [PLAIN_ERROR, record(("instances",), instances=OBJECTS)],
    "description": "The second form has the error of each instance.",
}
