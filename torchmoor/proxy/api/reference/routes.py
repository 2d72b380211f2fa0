"""The table of routes of both planes, the one source of /openapi.json on each plane and of docs/api.md."""

from __future__ import annotations

from typing import NamedTuple

from torchmoor.proxy.api import validation as members
from torchmoor.proxy.api.reference import schemas
from torchmoor.proxy.api.reference.route import ANY_BODY, JSON, NO_BODY, Body, Route

_STREAM = "text/event-stream"
_FRAMES = "application/vnd.amazon.eventstream"
_FORMS = (JSON, "text/plain", "application/octet-stream")
_INVOKE = (members.CUSTOM_ATTRIBUTES, members.TARGET_MODEL, members.TARGET_VARIANT, members.INFERENCE_ID)
_TURN = (*_INVOKE, members.SESSION_ID, members.PREFIX_AWARE_ID)
_ASYNC = (
    members.SAGEMAKER_CONTENT_TYPE,
    members.SAGEMAKER_ACCEPT,
    members.CUSTOM_ATTRIBUTES,
    members.INFERENCE_ID,
    members.INPUT_LOCATION,
    members.OUTPUT_PATH_EXTENSION,
    members.FILENAME,
    members.REQUEST_TTL,
    members.INVOCATION_TIMEOUT,
)
_ANY = Body(schema=schemas.ANY_FORM, types=_FORMS)
_PAGE = (
    ("limit", "Most entries in the answer."),
    ("order", "`asc` or `desc`, by time."),
    ("after", "The last id of the previous page."),
)


def _json(schema: schemas.Schema) -> Body:
    return Body(schema=schema)


def _get(path: str, operation: str, text: str, **more: object) -> Route:
    return Route(method="get", path=path, operation=operation, text=text, **more)  # type: ignore[arg-type]


def _post(path: str, operation: str, text: str, body: Body = NO_BODY, **more: object) -> Route:
    return Route(method="post", path=path, operation=operation, text=text, body=body, **more)  # type: ignore[arg-type]


def _delete(path: str, operation: str, text: str, **more: object) -> Route:
    return Route(method="delete", path=path, operation=operation, text=text, **more)  # type: ignore[arg-type]


def _streamed(schema: schemas.Schema) -> tuple[tuple[int, str, Body], ...]:
    text = "The answer: JSON, or server-sent events with `stream`."
    return ((200, text, Body(schema=schema, texts=(_STREAM,))),)


def _answer(schema: schemas.Schema, *types: str) -> tuple[tuple[int, str, Body], ...]:
    return ((200, "The answer.", Body(schema=schema, types=types or (JSON,))),)


_DONE = ((200, "Done.", ANY_BODY),)
_EMPTY = ((200, "Yes, with an empty body.", NO_BODY),)


class Group(NamedTuple):
    """Routes of one API. error: the schema of its errors."""

    name: str
    text: str
    error: schemas.Schema
    routes: tuple[Route, ...]


RUNTIME = Group(
    "runtime",
    "SageMaker's runtime API, as boto3's sagemaker-runtime sends it.",
    schemas.RUNTIME_ERROR,
    (
        _post(
            "/endpoints/{endpoint}/invocations",
            "InvokeEndpoint",
            "Ask a model; the answer comes as a whole.",
            _ANY,
            headers=_TURN,
            is_body_required=False,
        ),
        _post(
            "/endpoints/{endpoint}/invocations-response-stream",
            "InvokeEndpointWithResponseStream",
            "Ask a model; the answer is streamed.",
            _ANY,
            headers=_TURN,
            is_body_required=False,
            answers=((200, "An event stream of PayloadParts.", Body(schema=schemas.FRAMES, types=(_FRAMES,))),),
        ),
        _post(
            "/endpoints/{endpoint}/async-invocations",
            "InvokeEndpointAsync",
            "Queue a request; its result is written to the output location.",
            _ANY,
            headers=_ASYNC,
            is_body_required=False,
            answers=((202, "Queued; headers have the URLs of result and failure.", ANY_BODY),),
        ),
        _get(
            "/endpoints/{endpoint}",
            "DescribeEndpoint",
            "The endpoint's state, in the form of DescribeEndpoint.",
            answers=_answer(schemas.ENDPOINT),
        ),
    ),
)
_OPENAI_ROUTES = (
    _post(
        "/chat/completions",
        "createChatCompletion",
        "Answer a conversation's last message.",
        _json(schemas.CHAT),
        headers=_INVOKE[1:],
        answers=_streamed(schemas.CHAT_ANSWER),
    ),
    _post(
        "/completions",
        "createCompletion",
        "Continue a text.",
        _json(schemas.COMPLETION),
        headers=_INVOKE[1:],
        answers=_streamed(schemas.COMPLETION_ANSWER),
    ),
    _post(
        "/responses",
        "createResponse",
        "Answer, and store the response.",
        _json(schemas.RESPONSE),
        answers=_streamed(schemas.RESPONSE_ANSWER),
    ),
    _get(
        "/responses",
        "connectResponses",
        "Open a WebSocket connection (an upgrade request).",
        answers=((101, "The connection is a WebSocket.", NO_BODY),),
    ),
    _get(
        "/responses/{id}",
        "getResponse",
        "Get a stored response, or its events.",
        query=(("stream", "true for its events."), ("starting_after", "Only events after the one with this number.")),
        answers=_streamed(schemas.RESPONSE_ANSWER),
    ),
    _delete("/responses/{id}", "deleteResponse", "Delete a response.", answers=_answer(schemas.DELETED)),
    _post(
        "/responses/{id}/cancel",
        "cancelResponse",
        "Cancel a background response.",
        answers=_answer(schemas.RESPONSE_ANSWER),
    ),
    _get(
        "/responses/{id}/input_items",
        "listInputItems",
        "List the input items of a response.",
        query=_PAGE,
        answers=_answer(schemas.page(schemas.ITEM)),
    ),
    _post(
        "/responses/input_tokens",
        "countInputTokens",
        "Count a prompt's tokens.",
        _json(schemas.RESPONSE),
        answers=_answer(schemas.INPUT_TOKENS),
    ),
    _post(
        "/responses/compact",
        "compactResponse",
        "Shorten a conversation to a compaction item.",
        _json(schemas.RESPONSE),
        answers=_answer(schemas.COMPACTION),
    ),
    _post(
        "/conversations",
        "createConversation",
        "Open a conversation.",
        _json(schemas.CONVERSATION),
        is_body_required=False,
        answers=_answer(schemas.CONVERSATION_ANSWER),
    ),
    _get("/conversations/{id}", "getConversation", "Get a conversation.", answers=_answer(schemas.CONVERSATION_ANSWER)),
    _post(
        "/conversations/{id}",
        "updateConversation",
        "Replace a conversation's metadata.",
        _json(schemas.METADATA),
        answers=_answer(schemas.CONVERSATION_ANSWER),
    ),
    _delete("/conversations/{id}", "deleteConversation", "Delete a conversation.", answers=_answer(schemas.DELETED)),
    _get(
        "/conversations/{id}/items",
        "listConversationItems",
        "List a conversation's items.",
        query=_PAGE,
        answers=_answer(schemas.page(schemas.ITEM)),
    ),
    _post(
        "/conversations/{id}/items",
        "createConversationItems",
        "Add items to a conversation.",
        _json(schemas.ITEMS),
        answers=_answer(schemas.page(schemas.ITEM)),
    ),
    _get(
        "/conversations/{id}/items/{item}",
        "getConversationItem",
        "Get an item of a conversation.",
        answers=_answer(schemas.ITEM),
    ),
    _delete(
        "/conversations/{id}/items/{item}",
        "deleteConversationItem",
        "Delete an item of a conversation.",
        answers=_answer(schemas.CONVERSATION_ANSWER),
    ),
    _post(
        "/files",
        "createFile",
        "Upload a picture.",
        Body(schema=schemas.FILE, types=("multipart/form-data",)),
        answers=_answer(schemas.FILE_ANSWER),
    ),
    _get(
        "/files",
        "listFiles",
        "List the caller's files.",
        query=(*_PAGE, ("purpose", "Only files with this purpose.")),
        answers=_answer(schemas.page(schemas.FILE_ANSWER)),
    ),
    _get("/files/{id}", "retrieveFile", "Describe a file.", answers=_answer(schemas.FILE_ANSWER)),
    _get(
        "/files/{id}/content",
        "downloadFile",
        "Get a file's bytes.",
        answers=_answer(schemas.FILE_CONTENT, "application/octet-stream"),
    ),
    _delete("/files/{id}", "deleteFile", "Delete a file.", answers=_answer(schemas.DELETED)),
    _post(
        "/tokenize", "tokenize", "Split a prompt into tokens.", _json(schemas.TOKENIZE), answers=_answer(schemas.TOKENS)
    ),
    _post(
        "/detokenize",
        "detokenize",
        "Turn tokens into text.",
        _json(schemas.DETOKENIZE),
        answers=_answer(schemas.PROMPT),
    ),
    _post(
        "/embeddings",
        "createEmbedding",
        "Embed texts, with one of many models.",
        _json(schemas.EMBEDDINGS),
        headers=(members.TARGET_MODEL,),
    ),
    _post(
        "/rerank",
        "rerank",
        "Order documents by their relevance to a query.",
        _json(schemas.RERANK),
        headers=(members.TARGET_MODEL,),
    ),
    _get(
        "/models",
        "listModels",
        "List the endpoints as models, with their capabilities.",
        answers=_answer(schemas.MODELS),
    ),
    _get("/models/{model}", "retrieveModel", "Describe an endpoint as a model.", answers=_answer(schemas.MODEL)),
)
OPENAI = Group(
    "openai",
    "OpenAI's API. Each path is also below /endpoints/{endpoint}/openai.",
    schemas.OPENAI_ERROR,
    tuple(
        Route(**{**{name: getattr(route, name) for name in Route.__slots__}, "path": "/v1" + route.path})
        for route in _OPENAI_ROUTES
    ),
)
CONTAINER = Group(
    "container",
    "The API of SageMaker's containers. The operations on models exist only if torchmoor runs as a container.",
    schemas.CONTAINER_ERROR,
    (
        _get("/ping", "ping", "Is the first endpoint healthy? Needs no credentials.", answers=_EMPTY),
        _post(
            "/invocations",
            "invocations",
            "Ask the first endpoint's model.",
            _ANY,
            headers=_TURN,
            is_body_required=False,
        ),
        _get(
            "/models",
            "listLoadedModels",
            "List the loaded models.",
            query=(("next_page_token", "The token of the previous page."),),
            answers=_answer(schemas.LOADED_MODELS),
        ),
        _post("/models", "loadModel", "Load a model.", _json(schemas.LOAD_MODEL), answers=_DONE),
        _get("/models/{model}", "describeLoadedModel", "Describe a loaded model."),
        _delete("/models/{model}", "unloadModel", "Unload a model.", answers=_DONE),
        _post("/models/{model}/invoke", "invokeLoadedModel", "Ask a loaded model.", _ANY, is_body_required=False),
    ),
)
INFERENCE = Group(
    "open inference protocol",
    "Version 2, for the first endpoint with many models.",
    schemas.CONTAINER_ERROR,
    (
        _get(
            "/v2", "serverMetadata", "Get the server's name, version and extensions.", answers=_answer(schemas.SERVER)
        ),
        _get(
            "/v2/health/live", "serverLive", "Does the proxy run? Needs no credentials.", answers=_answer(schemas.LIVE)
        ),
        _get(
            "/v2/health/ready",
            "serverReady",
            "Is an instance ready? Needs no credentials.",
            answers=_answer(schemas.READY),
        ),
        _get("/v2/models/{model}", "modelMetadata", "Describe a model's inputs and outputs."),
        _get("/v2/models/{model}/ready", "modelReady", "Wait until a model is loaded; an unloaded model is loaded."),
        _post("/v2/models/{model}/infer", "modelInfer", "Run a model on tensors.", _json(schemas.TENSORS)),
    ),
)
REFERENCE = Group(
    "reference",
    "The reference.",
    schemas.RUNTIME_ERROR,
    (_get("/openapi.json", "openapi", "Get the OpenAPI document of this port.", answers=_answer(schemas.DOCUMENT)),),
)
ADMIN = Group(
    "admin",
    "The operators' API, on the admin plane's port.",
    schemas.ADMIN_ERROR,
    (
        _get(
            "/healthz",
            "healthz",
            "Has each endpoint a ready instance?",
            answers=((200, "Yes.", _json(schemas.HEALTH)), (503, "No.", _json(schemas.HEALTH))),
        ),
        _get("/livez", "livez", "Does the process run?", answers=_answer(schemas.LIVENESS)),
        _get(
            "/readyz",
            "readyz",
            "Is the state of the instances known?",
            answers=((200, "Yes.", _json(schemas.READINESS)), (503, "No.", _json(schemas.READINESS))),
        ),
        _get(
            "/metrics",
            "metrics",
            "Get the metrics in Prometheus' format.",
            answers=((200, "The page.", Body(schema=schemas.TEXT, types=("text/plain",))),),
        ),
        _get("/instances", "listInstances", "List the instances and their states.", answers=_answer(schemas.INSTANCES)),
        _get("/instances/{name}/history", "instanceHistory", "An instance's load, sessions, state and GPU over time."),
        _post("/instances/{name}/drain", "drainInstance", "Drain an instance: it gets no new sessions.", answers=_DONE),
        _post("/instances/{name}/resume", "resumeInstance", "End the drain of an instance.", answers=_DONE),
        _get(
            "/models",
            "listModelsOfInstances",
            "List the models of endpoints with many models.",
            answers=_answer(schemas.PLACED_MODELS),
        ),
        _post(
            "/models/{name}/{action}",
            "actOnModel",
            "Load, unload, pin, unpin or prewarm a model.",
            is_body_required=False,
        ),
        _get("/sessions", "listSessions", "List sessions by their hashes.", answers=_answer(schemas.SESSIONS)),
        _post("/sessions/{hash}/{action}", "actOnSession", "Close, pin or unpin a session."),
        _get(
            "/decisions",
            "listDecisions",
            "List the last routing decisions, with their reasons.",
            answers=_answer(schemas.DECISIONS),
        ),
        _get("/dashboard.json", "dashboard", "Get the dashboard's data.", answers=_answer(schemas.DASHBOARD)),
        _get("/async-requests", "listAsyncRequests", "List asynchronous requests."),
        _get("/async-requests/{id}", "describeAsyncRequest", "Describe an asynchronous request."),
        _get("/async-requests/{id}/result", "asyncResult", "Get the result of an asynchronous request."),
        _post("/async-requests/{id}/cancel", "cancelAsyncRequest", "Cancel an asynchronous request.", answers=_DONE),
    ),
)
DATA_PLANE = (RUNTIME, OPENAI, CONTAINER, INFERENCE, REFERENCE)
ADMIN_PLANE = (ADMIN, REFERENCE)
