"""The data plane's routes, the one source of its /openapi.json and of docs/api.md."""

from __future__ import annotations

from dataclasses import replace

from torchmoor.proxy.api import members
from torchmoor.proxy.api.reference import schemas, tgi_schemas
from torchmoor.proxy.api.reference.route import (
    EMPTY_ANSWER,
    EVENT_STREAM,
    JSON,
    NO_BODY,
    Body,
    Group,
    answer,
    delete,
    get,
    json_body,
    post,
    streamed,
)
from torchmoor.proxy.http.field_names import INFERENCE_ID

_FRAMES = "application/vnd.amazon.eventstream"
_FORMS = (JSON, "text/plain", "application/octet-stream")
_CHOICE = (members.TARGET_MODEL, members.TARGET_VARIANT, INFERENCE_ID)
_TURN = tuple(members.OF_INVOKE)
_ANY = Body(schema=schemas.ANY_FORM, types=_FORMS)
_PAGE = (
    ("limit", "Most entries in the answer."),
    ("order", "`asc` or `desc`, by time."),
    ("after", "The last id of the previous page."),
)
_INCLUDE = ("include[]", "message.output_text.logprobs for log probabilities.")


RUNTIME = Group(
    "runtime",
    "SageMaker's runtime API, as boto3's sagemaker-runtime sends it.",
    schemas.RUNTIME_ERROR,
    (
        post(
            "/endpoints/{endpoint}/invocations",
            "InvokeEndpoint",
            "Ask a model; the answer comes as a whole.",
            _ANY,
            headers=_TURN,
            is_body_required=False,
        ),
        post(
            "/endpoints/{endpoint}/invocations-response-stream",
            "InvokeEndpointWithResponseStream",
            "Ask a model; the answer is streamed.",
            _ANY,
            headers=_TURN,
            is_body_required=False,
            answers=((200, "An event stream of PayloadParts.", Body(schema=schemas.FRAMES, types=(_FRAMES,))),),
        ),
        post(
            "/endpoints/{endpoint}/async-invocations",
            "InvokeEndpointAsync",
            "Queue a request; its result is written to the output location.",
            _ANY,
            headers=tuple(members.OF_ASYNC),
            is_body_required=False,
            answers=((202, "Queued; headers have the URLs of result and failure.", json_body(schemas.QUEUED)),),
        ),
        get(
            "/endpoints/{endpoint}",
            "DescribeEndpoint",
            "The endpoint's state, in the form of DescribeEndpoint.",
            answers=answer(schemas.ENDPOINT),
        ),
    ),
)
_OPENAI_ROUTES = (
    post(
        "/chat/completions",
        "createChatCompletion",
        "Answer a conversation's last message.",
        json_body(schemas.CHAT),
        headers=_CHOICE,
        answers=streamed(schemas.CHAT_ANSWER),
    ),
    post(
        "/completions",
        "createCompletion",
        "Continue a text.",
        json_body(schemas.COMPLETION),
        headers=_CHOICE,
        answers=streamed(schemas.COMPLETION_ANSWER),
    ),
    post(
        "/responses",
        "createResponse",
        "Answer, and store the response.",
        json_body(schemas.RESPONSE),
        answers=streamed(schemas.RESPONSE_ANSWER),
    ),
    get(
        "/responses",
        "connectResponses",
        "Open a WebSocket connection (an upgrade request).",
        answers=((101, "The connection is a WebSocket.", NO_BODY),),
    ),
    get(
        "/responses/{id}",
        "getResponse",
        "Get a stored response, or its events.",
        query=(
            ("stream", "true for its events."),
            ("starting_after", "Only events after the one with this number."),
            _INCLUDE,
        ),
        answers=streamed(schemas.RESPONSE_ANSWER),
    ),
    delete("/responses/{id}", "deleteResponse", "Delete a response.", answers=answer(schemas.DELETED)),
    post(
        "/responses/{id}/cancel",
        "cancelResponse",
        "Cancel a background response.",
        answers=answer(schemas.RESPONSE_ANSWER),
    ),
    get(
        "/responses/{id}/input_items",
        "listInputItems",
        "List the input items of a response.",
        query=_PAGE,
        answers=answer(schemas.page(schemas.ITEM)),
    ),
    post(
        "/responses/input_tokens",
        "countInputTokens",
        "Count a prompt's tokens.",
        json_body(schemas.RESPONSE),
        answers=answer(schemas.INPUT_TOKENS),
    ),
    post(
        "/responses/compact",
        "compactResponse",
        "Shorten a conversation to a compaction item.",
        json_body(schemas.RESPONSE),
        answers=answer(schemas.COMPACTION),
    ),
    post(
        "/conversations",
        "createConversation",
        "Open a conversation.",
        json_body(schemas.CONVERSATION),
        is_body_required=False,
        answers=answer(schemas.CONVERSATION_ANSWER),
    ),
    get("/conversations/{id}", "getConversation", "Get a conversation.", answers=answer(schemas.CONVERSATION_ANSWER)),
    post(
        "/conversations/{id}",
        "updateConversation",
        "Replace a conversation's metadata.",
        json_body(schemas.METADATA),
        answers=answer(schemas.CONVERSATION_ANSWER),
    ),
    delete("/conversations/{id}", "deleteConversation", "Delete a conversation.", answers=answer(schemas.DELETED)),
    get(
        "/conversations/{id}/items",
        "listConversationItems",
        "List a conversation's items.",
        query=(*_PAGE, _INCLUDE),
        answers=answer(schemas.page(schemas.ITEM)),
    ),
    post(
        "/conversations/{id}/items",
        "createConversationItems",
        "Add items to a conversation.",
        json_body(schemas.ITEMS),
        answers=answer(schemas.page(schemas.ITEM)),
    ),
    get(
        "/conversations/{id}/items/{item}",
        "getConversationItem",
        "Get an item of a conversation.",
        query=(_INCLUDE,),
        answers=answer(schemas.ITEM),
    ),
    delete(
        "/conversations/{id}/items/{item}",
        "deleteConversationItem",
        "Delete an item of a conversation.",
        answers=answer(schemas.CONVERSATION_ANSWER),
    ),
    post(
        "/files",
        "createFile",
        "Upload an image.",
        Body(schema=schemas.FILE, types=("multipart/form-data",)),
        answers=answer(schemas.FILE_ANSWER),
    ),
    get(
        "/files",
        "listFiles",
        "List the caller's files.",
        query=(*_PAGE, ("purpose", "Only files with this purpose.")),
        answers=answer(schemas.page(schemas.FILE_ANSWER)),
    ),
    get("/files/{id}", "retrieveFile", "Describe a file.", answers=answer(schemas.FILE_ANSWER)),
    get(
        "/files/{id}/content",
        "downloadFile",
        "Get a file's bytes.",
        answers=answer(schemas.FILE_CONTENT, "application/octet-stream"),
    ),
    delete("/files/{id}", "deleteFile", "Delete a file.", answers=answer(schemas.DELETED)),
    post(
        "/tokenize",
        "tokenize",
        "Split a prompt into tokens.",
        json_body(schemas.TOKENIZE),
        answers=answer(schemas.TOKENS),
    ),
    post(
        "/detokenize",
        "detokenize",
        "Turn tokens into text.",
        json_body(schemas.DETOKENIZE),
        answers=answer(schemas.PROMPT),
    ),
    post(
        "/embeddings",
        "createEmbedding",
        "Embed texts, with one of many models.",
        json_body(schemas.EMBEDDINGS),
        headers=(members.TARGET_MODEL,),
        answers=answer(schemas.EMBEDDINGS_ANSWER),
    ),
    post(
        "/rerank",
        "rerank",
        "Order documents by their relevance to a query.",
        json_body(schemas.RERANK),
        headers=(members.TARGET_MODEL,),
        answers=answer(schemas.RERANK_ANSWER),
    ),
    get(
        "/models",
        "listModels",
        "List the endpoints as models, with their capabilities.",
        answers=answer(schemas.MODELS),
    ),
    get("/models/{model}", "retrieveModel", "Describe an endpoint as a model.", answers=answer(schemas.MODEL)),
)
OPENAI = Group(
    "openai",
    "OpenAI's API. Each path is also below /endpoints/{endpoint}/openai.",
    schemas.OPENAI_ERROR,
    tuple(replace(route, path="/v1" + route.path) for route in _OPENAI_ROUTES),
)
CONTAINER = Group(
    "container",
    "The API of SageMaker's containers. The operations on models exist only if torchmoor runs as a container.",
    schemas.CONTAINER_ERROR,
    (
        get("/ping", "ping", "Is the first endpoint healthy? Needs no credentials.", answers=EMPTY_ANSWER),
        post(
            "/invocations",
            "invocations",
            "Ask the first endpoint's model.",
            _ANY,
            headers=_TURN,
            is_body_required=False,
        ),
        post(
            "/",
            "invokeRoot",
            "Ask the first endpoint's model, as TGI's clients do.",
            Body(schema=schemas.ANY_FORM, types=("application/json",)),
            headers=_TURN,
        ),
        get(
            "/models",
            "listLoadedModels",
            "List the loaded models.",
            query=(("next_page_token", "The token of the previous page."),),
            answers=answer(schemas.LOADED_MODELS),
        ),
        post(
            "/models", "loadModel", "Load a model.", json_body(schemas.LOAD_MODEL), answers=answer(schemas.LOADED_MODEL)
        ),
        get("/models/{model}", "describeLoadedModel", "Describe a loaded model.", answers=answer(schemas.LOADED_MODEL)),
        delete("/models/{model}", "unloadModel", "Unload a model.", answers=answer(schemas.LOADED_MODEL)),
        post("/models/{model}/invoke", "invokeLoadedModel", "Ask a loaded model.", _ANY, is_body_required=False),
    ),
)
TGI = Group(
    "text generation inference",
    "The routes of Text Generation Inference (TGI), for the first endpoint.",
    tgi_schemas.ERROR,
    (
        post(
            "/generate",
            "generate",
            "Continue a text; the answer comes as a whole.",
            json_body(tgi_schemas.GENERATE),
            headers=_TURN,
            answers=answer(tgi_schemas.GENERATED),
        ),
        post(
            "/generate_stream",
            "generateStream",
            "Continue a text; the answer is streamed.",
            json_body(tgi_schemas.GENERATE),
            headers=_TURN,
            answers=answer(tgi_schemas.EVENTS, EVENT_STREAM),
        ),
        get("/info", "info", "Get the first endpoint's name.", answers=answer(tgi_schemas.INFO)),
        get("/health", "health", "Is the first endpoint healthy? Needs no credentials.", answers=EMPTY_ANSWER),
    ),
)
INFERENCE = Group(
    "open inference protocol",
    "Version 2, for the first endpoint with many models.",
    schemas.CONTAINER_ERROR,
    (
        get("/v2", "serverMetadata", "Get the server's name, version and extensions.", answers=answer(schemas.SERVER)),
        get("/v2/health/live", "serverLive", "Does the proxy run? Needs no credentials.", answers=answer(schemas.LIVE)),
        get(
            "/v2/health/ready",
            "serverReady",
            "Is an instance ready? Needs no credentials.",
            answers=answer(schemas.READY),
        ),
        get(
            "/v2/models/{model}",
            "modelMetadata",
            "Describe a model's inputs and outputs.",
            answers=answer(schemas.MODEL_METADATA),
        ),
        get(
            "/v2/models/{model}/ready",
            "modelReady",
            "Wait until a model is loaded; an unloaded model is loaded.",
            answers=answer(schemas.MODEL_READY),
        ),
        post(
            "/v2/models/{model}/infer",
            "modelInfer",
            "Run a model on tensors.",
            json_body(schemas.TENSORS),
            answers=answer(schemas.TENSORS_ANSWER, JSON, "application/octet-stream"),
        ),
    ),
)
REFERENCE = Group(
    "reference",
    "The reference.",
    schemas.RUNTIME_ERROR,
    (get("/openapi.json", "openapi", "Get the OpenAPI document of this port.", answers=answer(schemas.DOCUMENT)),),
)
DATA_PLANE = (RUNTIME, OPENAI, CONTAINER, TGI, INFERENCE, REFERENCE)
