"""The admin plane's routes, the one source of its /openapi.json and of docs/api.md."""

from __future__ import annotations

from torchmoor.proxy.api.reference import schemas
from torchmoor.proxy.api.reference.data_routes import REFERENCE
from torchmoor.proxy.api.reference.route import Body, Group, answer, get, json_body, post

ADMIN = Group(
    "admin",
    "The operators' API, on the admin plane's port.",
    schemas.ADMIN_ERROR,
    (
        get(
            "/healthz",
            "healthz",
            "Has each endpoint a ready instance?",
            answers=((200, "Yes.", json_body(schemas.HEALTH)), (503, "No.", json_body(schemas.HEALTH))),
        ),
        get("/livez", "livez", "Does the process run?", answers=answer(schemas.LIVENESS)),
        get(
            "/readyz",
            "readyz",
            "Is the state of the instances known?",
            answers=((200, "Yes.", json_body(schemas.READINESS)), (503, "No.", json_body(schemas.READINESS))),
        ),
        get(
            "/metrics",
            "metrics",
            "Get the metrics in Prometheus' format.",
            answers=((200, "The page.", Body(schema=schemas.TEXT, types=("text/plain",))),),
        ),
        get("/instances", "listInstances", "List the instances and their states.", answers=answer(schemas.INSTANCES)),
        get(
            "/instances/{name}/history",
            "instanceHistory",
            "An instance's load, sessions, state and GPU over time.",
            answers=answer(schemas.INSTANCE_HISTORY),
        ),
        post(
            "/instances/{name}/drain",
            "drainInstance",
            "Drain an instance: it gets no new sessions.",
            answers=answer(schemas.MOVED_INSTANCE),
        ),
        post(
            "/instances/{name}/resume",
            "resumeInstance",
            "End the drain of an instance.",
            answers=answer(schemas.MOVED_INSTANCE),
        ),
        get(
            "/models",
            "listModelsOfInstances",
            "List the models of endpoints with many models.",
            answers=answer(schemas.PLACED_MODELS),
        ),
        post(
            "/models/{name}/{action}",
            "actOnModel",
            "Pin, unpin, prewarm or unload a model.",
            is_body_required=False,
            answers=answer(schemas.MODEL_ACTION),
        ),
        get("/sessions", "listSessions", "List sessions by their hashes.", answers=answer(schemas.SESSIONS)),
        post(
            "/sessions/{hash}/{action}",
            "actOnSession",
            "Close, pin or unpin a session.",
            answers=answer(schemas.SESSION_ACTION),
        ),
        get(
            "/decisions",
            "listDecisions",
            "List the last routing decisions, with their reasons.",
            answers=answer(schemas.DECISIONS),
        ),
        get("/dashboard.json", "dashboard", "Get the dashboard's data.", answers=answer(schemas.DASHBOARD)),
        get(
            "/async-requests",
            "listAsyncRequests",
            "List asynchronous requests.",
            answers=answer(schemas.ASYNC_REQUESTS),
        ),
        get(
            "/async-requests/{id}",
            "describeAsyncRequest",
            "Describe an asynchronous request.",
            answers=answer(schemas.ASYNC_REQUEST),
        ),
        get("/async-requests/{id}/result", "asyncResult", "Get the result of an asynchronous request."),
        post(
            "/async-requests/{id}/cancel",
            "cancelAsyncRequest",
            "Cancel an asynchronous request.",
            answers=answer(schemas.CANCELLED_REQUEST),
        ),
    ),
)
ADMIN_PLANE = (ADMIN, REFERENCE)
