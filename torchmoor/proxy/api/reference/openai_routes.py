"""The routes of OpenAI's API."""

from __future__ import annotations

from dataclasses import replace

from torchmoor.proxy.api.reference import openai_schemas, resource_schemas
from torchmoor.proxy.api.reference.route import NO_BODY, Body, Group, answer, delete, get, json_body, post, streamed
from torchmoor.proxy.api.runtime_members import TARGET_MODEL, TARGET_VARIANT
from torchmoor.proxy.http.field_names import INFERENCE_ID

_CHOICE = (TARGET_MODEL, TARGET_VARIANT, INFERENCE_ID)
_PAGE = (
    ("limit", "Most entries in the answer."),
    ("order", "`asc` or `desc`, by time."),
    ("after", "The last id of the previous page."),
)
_INCLUDE = ("include[]", "message.output_text.logprobs for log probabilities.")
_ROUTES = (
    post(
        "/chat/completions",
        "createChatCompletion",
        "Answer a conversation's last message.",
        json_body(openai_schemas.CHAT),
        headers=_CHOICE,
        answers=streamed(openai_schemas.CHAT_ANSWER),
    ),
    post(
        "/completions",
        "createCompletion",
        "Continue a text.",
        json_body(openai_schemas.COMPLETION),
        headers=_CHOICE,
        answers=streamed(openai_schemas.COMPLETION_ANSWER),
    ),
    post(
        "/responses",
        "createResponse",
        "Answer, and store the response.",
        json_body(resource_schemas.RESPONSE),
        answers=streamed(resource_schemas.RESPONSE_ANSWER),
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
        answers=streamed(resource_schemas.RESPONSE_ANSWER),
    ),
    delete("/responses/{id}", "deleteResponse", "Delete a response.", answers=answer(resource_schemas.DELETED)),
    post(
        "/responses/{id}/cancel",
        "cancelResponse",
        "Cancel a background response.",
        answers=answer(resource_schemas.RESPONSE_ANSWER),
    ),
    get(
        "/responses/{id}/input_items",
        "listInputItems",
        "List the input items of a response.",
        query=_PAGE,
        answers=answer(resource_schemas.page(resource_schemas.ITEM)),
    ),
    post(
        "/responses/input_tokens",
        "countInputTokens",
        "Count a prompt's tokens.",
        json_body(resource_schemas.RESPONSE),
        answers=answer(resource_schemas.INPUT_TOKENS),
    ),
    post(
        "/responses/compact",
        "compactResponse",
        "Shorten a conversation to a compaction item.",
        json_body(resource_schemas.RESPONSE),
        answers=answer(resource_schemas.COMPACTION),
    ),
    post(
        "/conversations",
        "createConversation",
        "Open a conversation.",
        json_body(resource_schemas.CONVERSATION),
        is_body_required=False,
        answers=answer(resource_schemas.CONVERSATION_ANSWER),
    ),
    get(
        "/conversations/{id}",
        "getConversation",
        "Get a conversation.",
        answers=answer(resource_schemas.CONVERSATION_ANSWER),
    ),
    post(
        "/conversations/{id}",
        "updateConversation",
        "Replace a conversation's metadata.",
        json_body(resource_schemas.METADATA),
        answers=answer(resource_schemas.CONVERSATION_ANSWER),
    ),
    delete(
        "/conversations/{id}", "deleteConversation", "Delete a conversation.", answers=answer(resource_schemas.DELETED)
    ),
    get(
        "/conversations/{id}/items",
        "listConversationItems",
        "List a conversation's items.",
        query=(*_PAGE, _INCLUDE),
        answers=answer(resource_schemas.page(resource_schemas.ITEM)),
    ),
    post(
        "/conversations/{id}/items",
        "createConversationItems",
        "Add items to a conversation.",
        json_body(resource_schemas.ITEMS),
        answers=answer(resource_schemas.page(resource_schemas.ITEM)),
    ),
    get(
        "/conversations/{id}/items/{item}",
        "getConversationItem",
        "Get an item of a conversation.",
        query=(_INCLUDE,),
        answers=answer(resource_schemas.ITEM),
    ),
    delete(
        "/conversations/{id}/items/{item}",
        "deleteConversationItem",
        "Delete an item of a conversation.",
        answers=answer(resource_schemas.CONVERSATION_ANSWER),
    ),
    post(
        "/files",
        "createFile",
        "Upload an image.",
        Body(schema=resource_schemas.FILE, types=("multipart/form-data",)),
        answers=answer(resource_schemas.FILE_ANSWER),
    ),
    get(
        "/files",
        "listFiles",
        "List the caller's files.",
        query=(*_PAGE, ("purpose", "Only files with this purpose.")),
        answers=answer(resource_schemas.page(resource_schemas.FILE_ANSWER)),
    ),
    get("/files/{id}", "retrieveFile", "Describe a file.", answers=answer(resource_schemas.FILE_ANSWER)),
    get(
        "/files/{id}/content",
        "downloadFile",
        "Get a file's bytes.",
        answers=answer(resource_schemas.FILE_CONTENT, "application/octet-stream"),
    ),
    delete("/files/{id}", "deleteFile", "Delete a file.", answers=answer(resource_schemas.DELETED)),
    post(
        "/tokenize",
        "tokenize",
        "Split a prompt into tokens.",
        json_body(openai_schemas.TOKENIZE),
        answers=answer(openai_schemas.TOKENS),
    ),
    post(
        "/detokenize",
        "detokenize",
        "Turn tokens into text.",
        json_body(openai_schemas.DETOKENIZE),
        answers=answer(openai_schemas.PROMPT),
    ),
    post(
        "/embeddings",
        "createEmbedding",
        "Embed texts, with one of many models.",
        json_body(openai_schemas.EMBEDDINGS),
        headers=(TARGET_MODEL,),
        answers=answer(openai_schemas.EMBEDDINGS_ANSWER),
    ),
    post(
        "/rerank",
        "rerank",
        "Order documents by their relevance to a query.",
        json_body(openai_schemas.RERANK),
        headers=(TARGET_MODEL,),
        answers=answer(openai_schemas.RERANK_ANSWER),
    ),
    get(
        "/models",
        "listModels",
        "List the endpoints as models, with their capabilities.",
        answers=answer(openai_schemas.MODELS),
    ),
    get("/models/{model}", "retrieveModel", "Describe an endpoint as a model.", answers=answer(openai_schemas.MODEL)),
)
OPENAI = Group(
    "openai",
    "OpenAI's API. Each path is also below /endpoints/{endpoint}/openai.",
    openai_schemas.ERROR,
    tuple(replace(route, path="/v1" + route.path) for route in _ROUTES),
)
