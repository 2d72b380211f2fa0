"""OpenAI's resources: responses, conversations and files, and tokenize, selected by method and path."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

from handlers.chat.checks import check_unicode
from handlers.chat.commands import (
    Command,
    Compact,
    CountTokens,
    DeleteConversation,
    DeleteFile,
    DeleteResponse,
    EndResponse,
    Generate,
    ItemQuery,
    ListFiles,
    OpenSession,
    Respond,
    RespondInConversation,
    RunResponse,
    ShowConversation,
    ShowFile,
    ShowResponse,
    UpdateConversation,
)
from handlers.chat.dialects.conversation_requests import parse_conversation, parse_items, refuse_other_fields
from handlers.chat.dialects.file_requests import parse_file
from handlers.chat.dialects.responses import parse_response, read_metadata, resolve, unknown_field
from handlers.chat.dialects.tokens import parse_detokenize, parse_tokenize
from handlers.chat.dialects.turns import check_session_limit
from handlers.chat.identity import identify
from handlers.chat.items import Referred, find_references
from handlers.errors import InvalidRequest, ResponseUnknown
from handlers.requests.incoming import Incoming
from handlers.settings.request import RequestSettings
from torchmoor.wire import background

MAX_LIMIT = 100  # items of a page: OpenAI's limit
MAX_FILE_LIMIT = 10_000  # of files: OpenAI's limit; a page has at most MAX_LIMIT
MAX_DIGITS = 9


def parse_resource(
    resource: str, incoming: Incoming, read_body: Callable[[], dict[str, Any]], settings: RequestSettings, now: float
) -> Command:
    """Read a request of OpenAI's API. resource: its method and its path below /v1/, with its query.

    Raises InvalidRequest, ContextTooLong, ResponseUnknown, SessionLimitReached.
    """
    target, _, query = resource.partition("?")
    method, _, path = target.partition(" ")
    parts = path.split("/")
    ids = [unquote(part) for part in parts[1::2]]  # each behind the name of its collection
    caller, values = incoming.caller, dict(parse_qsl(query))
    match method, *(part or None for part in parts):  # str(): an id, which is not empty
        case ("POST", "responses") | ("POST", "responses", "input_tokens" | "compact"):
            return _parse_input(incoming, target, read_body(), settings, now)
        case "POST", "responses", str(), "cancel":
            return EndResponse(caller=caller, response_id=ids[0], ended={"status": background.CANCELLED})
        case background.RUN, "responses", str():
            return RunResponse(caller=caller, response_id=ids[0], invocation_id=incoming.invocation_id)
        case background.END, "responses", str():
            return EndResponse(caller=caller, response_id=ids[0], ended=_read_end(read_body()))
        case "GET", "responses", str():
            stream_after, included = _parse_stream(values), _parse_included(query)
            return ShowResponse(caller=caller, response_id=ids[0], stream_after=stream_after, included=included)
        case "GET", "responses", str(), "input_items":
            return ShowResponse(caller=caller, response_id=ids[0], items=_parse_page(values))
        case "DELETE", "responses", str():
            return DeleteResponse(caller=caller, response_id=ids[0], invocation_id=incoming.invocation_id)
        case "POST", "conversations":
            return parse_conversation(incoming, read_body(), now)
        case "POST", "conversations", str(), "items":
            return parse_items(incoming, ids[0], read_body())
        case "GET", "conversations", str():
            return ShowConversation(caller=caller, conversation_id=ids[0])
        case "GET", "conversations", str(), "items":
            page, included = _parse_page(values), _parse_included(query)
            return ShowConversation(caller=caller, conversation_id=ids[0], page=page, included=included)
        case "GET", "conversations", str(), "items", str():
            included = _parse_included(query)
            return ShowConversation(caller=caller, conversation_id=ids[0], item_id=ids[1], included=included)
        case "POST", "conversations", str():
            body = read_body()
            refuse_other_fields(body, {"metadata"})
            return UpdateConversation(caller=caller, conversation_id=ids[0], metadata=read_metadata(body))
        case "DELETE", "conversations", str(), "items", str():
            return UpdateConversation(caller=caller, conversation_id=ids[0], item_id=ids[1])
        case "DELETE", "conversations", str():
            return DeleteConversation(caller=caller, conversation_id=ids[0], invocation_id=incoming.invocation_id)
        case "POST", "files":
            return parse_file(incoming, read_body(), now)
        case "GET", "files":
            page = _parse_page(values, MAX_FILE_LIMIT, MAX_LIMIT)
            return ListFiles(caller=caller, page=page, purpose=values.get("purpose", ""))
        case "GET", "files", str():
            return ShowFile(caller=caller, file_id=ids[0], has_content=False)
        case "GET", "files", str(), "content":
            return ShowFile(caller=caller, file_id=ids[0], has_content=True)
        case "DELETE", "files", str():
            return DeleteFile(caller=caller, file_id=ids[0], invocation_id=incoming.invocation_id)
        case "POST", "tokenize":
            return parse_tokenize(incoming, read_body(), settings, now)
        case "POST", "detokenize":
            return parse_detokenize(read_body())
        case _:
            raise ResponseUnknown(f"Invalid URL ({method} /v1/{path[:100]})", api_code="unknown_url")


def _parse_input(
    incoming: Incoming, target: str, body: dict[str, Any], settings: RequestSettings, now: float
) -> Command:
    """Read a body with an `input`: a response, the count of its tokens, or its compaction."""

    def resume(referred: Referred) -> Command:
        if target == "POST responses":
            return parse_response(incoming, body, settings, now, referred)
        # Nothing is stored; but the API has no `store: false` with a conversation.
        changed = {**body, "store": None if body.get("conversation") else False, "background": False}
        request = parse_response(incoming, changed, settings, now, referred)
        assert isinstance(request, Generate | Respond | RespondInConversation)
        if target == "POST responses/input_tokens":
            return CountTokens(request=request)
        if isinstance(request, RespondInConversation):
            raise unknown_field("conversation")
        check_session_limit(incoming)
        opening = OpenSession(
            caller=incoming.caller,
            invocation_id=incoming.invocation_id,
            question=identify(body.get("input"), body.get("previous_response_id")),
        )
        return Compact(request=request, opening=opening, created_at=int(now))

    return resolve(incoming, find_references(body.get("input"), settings.max_messages), resume)


def _read_end(body: dict[str, Any]) -> dict[str, Any]:
    """Read why a response in the background ends, as fields of its object. Raises InvalidRequest."""
    status, message = body.get(background.STATUS), body.get(background.MESSAGE)
    if status == background.CANCELLED:
        return {"status": status}
    if status != background.FAILED or not isinstance(message, str):
        raise InvalidRequest(f"a response ends as {background.CANCELLED}, or as {background.FAILED} with a message")
    check_unicode(message, f"'{background.MESSAGE}'", background.MESSAGE)
    return {"status": status, "error": {"code": "server_error", "message": message}}


def _parse_stream(query: Mapping[str, str]) -> int | None:
    """Return the number of the event after which a stream begins; None if the request wants no stream."""
    if query.get("stream") != "true":
        return None
    number = query.get("starting_after", "-1")
    if number != "-1" and (not number.isdecimal() or len(number) > MAX_DIGITS):
        most = 10**MAX_DIGITS - 1
        raise InvalidRequest(f"'starting_after' must be a whole number from 0 to {most}", param="starting_after")
    return int(number)


def _parse_included(query: str) -> frozenset[str]:
    """Return what a query wants to see besides. OpenAI's clients write a list as `include[]`."""
    return frozenset(value for name, value in parse_qsl(query) if name in ("include", "include[]"))


def _parse_page(query: Mapping[str, str], max_limit: int = MAX_LIMIT, default: int = 20) -> ItemQuery:
    limit, order = query.get("limit", str(default)), query.get("order", "desc")
    if not limit.isdecimal() or not 1 <= int(limit[:MAX_DIGITS]) <= max_limit:
        raise InvalidRequest(f"'limit' must be a whole number from 1 to {max_limit}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' must be asc or desc", param="order")
    number = min(int(limit[:MAX_DIGITS]), MAX_LIMIT)
    return ItemQuery(after=query.get("after", ""), limit=number, is_ascending=order == "asc")
