"""OpenAI's resources, selected by method and path: responses, conversations and files; and tokenize."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

from handlers.chat.checks import check_unicode
from handlers.chat.commands import (
    AddItems,
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
    OpenFile,
    OpenSession,
    Respond,
    RespondInConversation,
    RunResponse,
    ShowConversation,
    ShowFile,
    ShowResponse,
    UpdateConversation,
)
from handlers.chat.dialects.response_form import show_failure
from handlers.chat.dialects.responses import missing_field, parse_response, read_metadata, resolve, unknown_field
from handlers.chat.dialects.tokens import parse_detokenize, parse_tokenize
from handlers.chat.dialects.turns import check_session_limit
from handlers.chat.identity import identify
from handlers.chat.items import Referred, check_results, find_references, parse_input
from handlers.errors import InvalidRequest, ResponseUnknown
from handlers.requests.incoming import Incoming
from handlers.settings.request import RequestSettings
from torchmoor.wire import background
from torchmoor.wire import headers as wire

MAX_LIMIT = 100  # items of a page: OpenAI's limit
MAX_FILE_LIMIT = 10_000  # of files: OpenAI's limit; a page has at most MAX_LIMIT
MAX_DIGITS = 9
UNNAMED_FILE = "picture"
MAX_FILENAME_CHARS = 255
LIFETIMES_S = range(3600, 2_592_001)  # of files: OpenAI's limits
MAX_ADDED_ITEMS = 20  # of a conversation, by one request: OpenAI's limit


def parse_resource(
    resource: str, incoming: Incoming, read_body: Callable[[], dict[str, Any]], settings: RequestSettings
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
            return _parse_input(incoming, target, read_body(), settings)
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
            return _parse_conversation(incoming, read_body())
        case "POST", "conversations", str(), "items":
            return _parse_items(incoming, ids[0], read_body())
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
            _refuse_other_fields(body, {"metadata"})
            return UpdateConversation(caller=caller, conversation_id=ids[0], metadata=read_metadata(body))
        case "DELETE", "conversations", str(), "items", str():
            return UpdateConversation(caller=caller, conversation_id=ids[0], item_id=ids[1])
        case "DELETE", "conversations", str():
            return DeleteConversation(caller=caller, conversation_id=ids[0], invocation_id=incoming.invocation_id)
        case "POST", "files":
            return _parse_file(incoming)
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
            return parse_tokenize(incoming, read_body(), settings)
        case "POST", "detokenize":
            return parse_detokenize(read_body())
        case _:
            raise ResponseUnknown(f"Invalid URL ({method} /v1/{path[:100]})", api_code="unknown_url")


def _parse_input(incoming: Incoming, target: str, body: dict[str, Any], settings: RequestSettings) -> Command:
    """Read a body with an `input`: a response, the count of its tokens, or its compaction."""

    def resume(referred: Referred) -> Command:
        if target == "POST responses":
            return parse_response(incoming, body, settings, referred)
        # Nothing is stored; but the API has no `store: false` with a conversation.
        changed = {**body, "store": None if body.get("conversation") else False, "background": False}
        request = parse_response(incoming, changed, settings, referred)
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
        return Compact(request=request, opening=opening, created_at=int(incoming.received_at))

    return resolve(incoming, find_references(body.get("input"), settings.max_messages), resume)


def _read_end(body: dict[str, Any]) -> dict[str, Any]:
    """Read why a response in the background ends, as fields of its object. Raises InvalidRequest."""
    status, message = body.get(background.STATUS), body.get(background.MESSAGE)
    if status == background.CANCELLED:
        return {"status": status}
    if status != background.FAILED or not isinstance(message, str):
        raise InvalidRequest(f"a response ends as {background.CANCELLED}, or as {background.FAILED} with a message")
    check_unicode(message, f"'{background.MESSAGE}'", background.MESSAGE)
    return {"status": status, "error": show_failure(body.get(background.CODE), message)}


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


def _parse_conversation(incoming: Incoming, body: dict[str, Any]) -> Command:
    """Read a body that opens a conversation."""
    _refuse_other_fields(body, {"items", "metadata"})
    check_session_limit(incoming)
    metadata = read_metadata(body)
    opening = OpenSession(
        caller=incoming.caller,
        invocation_id=incoming.invocation_id,
        question=identify(body.get("items"), metadata),
        resource=json.dumps({"object": "conversation", "created_at": int(incoming.received_at), "metadata": metadata}),
    )

    def resume(referred: Referred) -> AddItems:
        items = parse_input(body.get("items") or [], MAX_ADDED_ITEMS, "items", referred)
        check_results(items, (), "items")
        return AddItems(
            caller=incoming.caller,
            conversation_id="",
            items=items,
            invocation_id=incoming.invocation_id,
            opening=opening,
        )

    return resolve(incoming, find_references(body.get("items"), MAX_ADDED_ITEMS, "items"), resume)


def _parse_items(incoming: Incoming, conversation_id: str, body: dict[str, Any]) -> Command:
    """Read a body that adds items to a conversation."""
    _refuse_other_fields(body, {"items", "include"})
    if not body.get("items"):
        raise missing_field("items")

    def resume(referred: Referred) -> AddItems:
        items = parse_input(body["items"], MAX_ADDED_ITEMS, "items", referred)
        return AddItems(
            caller=incoming.caller, conversation_id=conversation_id, items=items, invocation_id=incoming.invocation_id
        )

    return resolve(incoming, find_references(body["items"], MAX_ADDED_ITEMS, "items"), resume)


def _refuse_other_fields(body: dict[str, Any], known: set[str]) -> None:
    unknown = {name for name, value in body.items() if value is not None} - known
    if unknown:
        raise unknown_field(min(unknown))


def _parse_file(incoming: Incoming) -> OpenFile:
    """Read a form with an image."""
    content, purpose = incoming.form.get("file"), incoming.form.get("purpose", b"")
    if not content:
        raise missing_field("file")
    if purpose not in (b"vision", b"user_data"):
        raise InvalidRequest("'purpose' must be vision or user_data: files are images here", param="purpose")
    check_session_limit(incoming)
    fields = {
        "object": "file",
        "bytes": len(content),
        "created_at": int(incoming.received_at),
        "filename": _read_filename(incoming) or UNNAMED_FILE,
        "purpose": purpose.decode(),
        "status": "processed",
    }
    opening = OpenSession(
        caller=incoming.caller,
        images=(content,),
        ttl_s=_read_lifetime(incoming.form),
        invocation_id=incoming.invocation_id,
        resource=json.dumps(fields),
    )
    return OpenFile(opening=opening)


def _read_lifetime(form: Mapping[str, bytes]) -> int | None:
    """Return the seconds of `expires_after`, as OpenAI's clients send it; None without it. Raises InvalidRequest."""
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != b"created_at":
        raise InvalidRequest("'expires_after[anchor]' must be created_at", param="expires_after[anchor]")
    lifetime_s = int(seconds) if seconds and re.fullmatch(rb"[0-9]{1,9}", seconds) else 0
    if lifetime_s not in LIFETIMES_S:
        wanted = f"a whole number of seconds from {LIFETIMES_S[0]} to {LIFETIMES_S[-1]}"
        raise InvalidRequest(f"'expires_after[seconds]' must be {wanted}", param="expires_after[seconds]")
    return lifetime_s


def _read_filename(incoming: Incoming) -> str:
    """Return the uploaded file's name without path and unprintable characters; empty if the proxy has sent none."""
    name = unquote(incoming.headers.get(wire.FORM_FILENAME, ""), errors="ignore")
    printable = "".join(each for each in re.split(r"[/\\]", name)[-1] if each.isprintable())
    return printable.strip()[:MAX_FILENAME_CHARS]
