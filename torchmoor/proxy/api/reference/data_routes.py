"""The data plane's routes, the one source of its /openapi.json and of docs/api.md."""

from __future__ import annotations

from torchmoor.proxy.api.reference import (
    common_schemas,
    data_schemas,
)
from torchmoor.proxy.api.reference.openai_routes import OPENAI
from torchmoor.proxy.api.reference.route import (
    EMPTY_ANSWER,
    EVENT_STREAM,
    JSON,
    Body,
    Group,
    answer,
    delete,
    get,
    json_body,
    post,
)
from torchmoor.proxy.api.runtime_members import OF_ASYNC, OF_INVOKE

_FRAMES = "application/vnd.amazon.eventstream"
_FORMS = (JSON, "text/plain", "application/octet-stream")
_TURN = tuple(OF_INVOKE)
_ANY = Body(schema=common_schemas.ANY_FORM, types=_FORMS)


RUNTIME = Group(
    "runtime",
    "SageMaker's runtime API, as boto3's sagemaker-runtime sends it.",
    data_schemas.RUNTIME_ERROR,
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
            answers=((200, "An event stream of PayloadParts.", Body(schema=data_schemas.FRAMES, types=(_FRAMES,))),),
        ),
        post(
            "/endpoints/{endpoint}/async-invocations",
            "InvokeEndpointAsync",
            "Queue a request; its result is written to the output location.",
            _ANY,
            headers=tuple(OF_ASYNC),
            is_body_required=False,
            answers=((202, "Queued; headers have the URLs of result and failure.", json_body(data_schemas.QUEUED)),),
        ),
        get(
            "/endpoints/{endpoint}",
            "DescribeEndpoint",
            "The endpoint's state, in the form of DescribeEndpoint.",
            answers=answer(data_schemas.ENDPOINT),
        ),
    ),
)
CONTAINER = Group(
    "container",
    "The API of SageMaker's containers. The operations on models exist only if torchmoor runs as a container.",
    data_schemas.CONTAINER_ERROR,
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
        get(
            "/models",
            "listLoadedModels",
            "List the loaded models.",
            query=(("next_page_token", "The token of the previous page."),),
            answers=answer(data_schemas.LOADED_MODELS),
        ),
        post(
            "/models",
            "loadModel",
            "Load a model.",
            json_body(data_schemas.LOAD_MODEL),
            answers=answer(data_schemas.LOADED_MODEL),
        ),
        get(
            "/models/{model}",
            "describeLoadedModel",
            "Describe a loaded model.",
            answers=answer(data_schemas.LOADED_MODEL),
        ),
        delete("/models/{model}", "unloadModel", "Unload a model.", answers=answer(data_schemas.LOADED_MODEL)),
        post("/models/{model}/invoke", "invokeLoadedModel", "Ask a loaded model.", _ANY, is_body_required=False),
    ),
)
TGI = Group(
    "text generation inference",
    "The routes of Text Generation Inference (TGI), for the first endpoint.",
    data_schemas.TGI_ERROR,
    (
        post(
            "/generate",
            "generate",
            "Continue a text; the answer comes as a whole.",
            json_body(data_schemas.GENERATE),
            headers=_TURN,
            answers=answer(data_schemas.GENERATED),
        ),
        post(
            "/generate_stream",
            "generateStream",
            "Continue a text; the answer is streamed.",
            json_body(data_schemas.GENERATE),
            headers=_TURN,
            answers=answer(data_schemas.TGI_EVENTS, EVENT_STREAM),
        ),
        post(
            "/",
            "invokeRoot",
            "Ask the first endpoint's model, as TGI's clients do.",
            json_body(common_schemas.ANY_FORM),
            headers=_TURN,
        ),
        get("/info", "info", "Get the first endpoint's name.", answers=answer(data_schemas.INFO)),
        get("/health", "health", "Is the first endpoint healthy? Needs no credentials.", answers=EMPTY_ANSWER),
    ),
)
INFERENCE = Group(
    "open inference protocol",
    "Version 2, for the first endpoint with many models.",
    data_schemas.CONTAINER_ERROR,
    (
        get(
            "/v2",
            "serverMetadata",
            "Get the server's name, version and extensions.",
            answers=answer(data_schemas.SERVER),
        ),
        get(
            "/v2/health/live",
            "serverLive",
            "Does the proxy run? Needs no credentials.",
            answers=answer(data_schemas.LIVE),
        ),
        get(
            "/v2/health/ready",
            "serverReady",
            "Is an instance ready? Needs no credentials.",
            answers=answer(data_schemas.READY),
        ),
        get(
            "/v2/models/{model}",
            "modelMetadata",
            "Describe a model's inputs and outputs.",
            answers=answer(data_schemas.MODEL_METADATA),
        ),
        get(
            "/v2/models/{model}/ready",
            "modelReady",
            "Wait until a model is loaded; an unloaded model is loaded.",
            answers=answer(data_schemas.MODEL_READY),
        ),
        post(
            "/v2/models/{model}/infer",
            "modelInfer",
            "Run a model on tensors.",
            json_body(data_schemas.TENSORS),
            answers=answer(data_schemas.TENSORS_ANSWER, JSON, "application/octet-stream"),
        ),
    ),
)
REFERENCE = Group(
    "reference",
    "The reference.",
    data_schemas.RUNTIME_ERROR,
    (
        get(
            "/openapi.json",
            "openapi",
            "Get the OpenAPI document of this port.",
            answers=answer(data_schemas.DOCUMENT),
        ),
    ),
)
DATA_PLANE = (RUNTIME, OPENAI, CONTAINER, TGI, INFERENCE, REFERENCE)
