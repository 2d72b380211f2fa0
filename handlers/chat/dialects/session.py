"""The dialect of the session API: bodies of AWS's LLaVA sample and of its guide to stateful sessions, and answers."""

from dataclasses import dataclass, replace
from typing import Any

from handlers.chat.checks import check_unicode, is_int, is_unicode
from handlers.chat.commands import AddImages, Ask, BranchSession, CloseSession, Command, OpenSession, StopAnswer
from handlers.chat.dialects.tgi_lmi import LmiForm, TgiForm, details_of
from handlers.chat.dialects.turns import check_session_limit
from handlers.chat.forms import AnswerForm, Summary, Token, encode
from handlers.chat.messages import SYSTEM, TOOL, ImageReference, Message, TextPart, write_results
from handlers.chat.parameters import Parameters, check_fields, parse_parameters
from handlers.chat.template_variables import TEMPLATE_FIELD, read_template_variables
from handlers.chat.tools import TOOL_FIELDS, read_tools
from handlers.errors import HandlerError, InvalidRequest, SessionIdMismatch
from handlers.requests.incoming import Incoming
from torchmoor.wire import headers as wire
from torchmoor.wire.headers import NEW_SESSION
from torchmoor.wire.marked_text import ERROR_MARK

_FIELDS: dict[str, set[str]] = {  # by the request's type
    "start_session": {"path", "image", "images", "ttl_s"},
    "add_images": {"path", "image", "images"},
    "send_text_prompt": {
        *("prompt_text", "tool_results", "system", "path", "image", "images", "parameters", "stream"),
        *TOOL_FIELDS,
        TEMPLATE_FIELD,
    },
    "stop_answer": set(),
    "branch_session": {"turns", "ttl_s"},
    "close_session": set(),
}
_REQUEST_TYPES = {NEW_SESSION: "start_session", "CLOSE": "close_session"}


def parse_image(incoming: Incoming, image: bytes) -> Command:
    """Read a body that is an image: it opens a session, or is added to the session that the header names.

    NEW_SESSION is not required, because asynchronous requests cannot have the session header.
    """
    header_id = incoming.headers.get(wire.SESSION_ID)
    is_declared = incoming.media_type.startswith("image/")
    if header_id == NEW_SESSION or (is_declared and not header_id):
        check_session_limit(incoming)
        return OpenSession(caller=incoming.caller, images=(image,), invocation_id=incoming.invocation_id)
    session_id = _session_id(header_id, None)
    return AddImages(
        caller=incoming.caller, session_id=session_id, images=(image,), invocation_id=incoming.invocation_id
    )


def parse_session(incoming: Incoming, body: dict[str, Any]) -> Command:
    """Read a body of the session API. Raises InvalidRequest, SessionIdMismatch."""
    header_id = incoming.headers.get(wire.SESSION_ID)
    kind = _kind(body)
    check_fields(kind, body, _FIELDS[kind] | {"type", "requestType", "session_id"})
    if kind == "start_session":
        return _parse_open(incoming, body, header_id)
    session_id = _session_id(header_id, body.get("session_id"))
    if kind == "close_session":
        return CloseSession(caller=incoming.caller, session_id=session_id, invocation_id=incoming.invocation_id)
    if kind == "stop_answer":
        return StopAnswer(caller=incoming.caller, session_id=session_id)
    if kind == "branch_session":
        return _parse_branch(incoming, body, session_id)
    images = _images(body)
    if kind == "add_images":
        if not images:
            raise InvalidRequest("add_images needs an image: give 'path', 'image' or 'images'")
        return AddImages(
            caller=incoming.caller, session_id=session_id, images=images, invocation_id=incoming.invocation_id
        )
    return _parse_ask(incoming, body, session_id, images)


def _kind(body: dict[str, Any]) -> str:
    request_type = body.get("requestType")
    if request_type is not None:
        if not isinstance(request_type, str) or request_type not in _REQUEST_TYPES:
            raise InvalidRequest(f"'requestType' must be one of {', '.join(_REQUEST_TYPES)}")
        return _REQUEST_TYPES[request_type]
    kind = body.get("type")
    if kind is None and (field := next((name for name in ("input", "documents") if name in body), None)):
        raise InvalidRequest(
            f"this model generates text, and '{field}' is for a model of embeddings or rerank: send 'messages', "
            "'prompt' or 'inputs'",
            param="model",
        )
    kinds = ", ".join(_FIELDS)
    if kind is None:
        raise InvalidRequest(f"the body needs 'messages', 'prompt' or 'inputs', or, for a session, a 'type': {kinds}")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise InvalidRequest(
            f"'type' must be one of {kinds}; or send 'messages', 'prompt' or 'inputs' for an answer without a session"
        )
    return kind


def _session_id(header: str | None, field: Any) -> str:
    if field is not None and not isinstance(field, str):
        raise InvalidRequest("'session_id' must be a string")
    if header == NEW_SESSION:
        raise InvalidRequest("the session header says NEW_SESSION, but the body does not open one")
    if header and field and header != field:
        raise SessionIdMismatch("the session id in the header and the one in the body are not the same")
    session_id = header or field
    if not session_id:
        raise InvalidRequest("there is no session id: give 'session_id' in the body or X-Amzn-SageMaker-Session-Id")
    return session_id


def _parse_open(incoming: Incoming, body: dict[str, Any], header_id: str | None) -> OpenSession:
    if header_id not in (None, "", NEW_SESSION) or body.get("session_id") not in (None, "", NEW_SESSION):
        raise InvalidRequest("a session is opened without an id, or with NEW_SESSION in the session header")
    images = _images(body)
    if not images and "requestType" not in body:
        raise InvalidRequest(
            "start_session needs an image: give 'path' (http, https or data URL), 'image' or 'images'; "
            '{"requestType": "NEW_SESSION"} opens a session without one'
        )
    return _opening(incoming, body, images)


def _opening(incoming: Incoming, body: dict[str, Any], images: tuple[ImageReference, ...] = ()) -> OpenSession:
    ttl_s = body.get("ttl_s")
    if ttl_s is not None and (not is_int(ttl_s) or ttl_s < 1):
        raise InvalidRequest("'ttl_s' must be a whole number of seconds, 1 or more")
    check_session_limit(incoming)
    return OpenSession(caller=incoming.caller, images=images, ttl_s=ttl_s, invocation_id=incoming.invocation_id)


def _parse_branch(incoming: Incoming, body: dict[str, Any], session_id: str) -> BranchSession:
    num_turns = body.get("turns")
    if not is_int(num_turns) or num_turns < 1:
        raise InvalidRequest("'turns' must be the number of the session's turns that the branch begins with, 1 or more")
    return BranchSession(opening=_opening(incoming, body), session_id=session_id, num_turns=num_turns)


def _parse_ask(incoming: Incoming, body: dict[str, Any], session_id: str, images: tuple[ImageReference, ...]) -> Ask:
    are_results = body.get("tool_results") is not None
    prompt = _results(body) if are_results else body.get("prompt_text")
    if not isinstance(prompt, str) or not prompt.strip():
        raise InvalidRequest("'prompt_text' must be a text that is not empty")
    check_unicode(prompt, "'prompt_text'", None)
    system = body.get("system")
    if system is not None and not (isinstance(system, str) and system.strip() and is_unicode(system)):
        raise InvalidRequest("'system' must be a text of valid Unicode that is not empty", param="system")
    is_streaming = body.get("stream", False)
    if not isinstance(is_streaming, bool):
        raise InvalidRequest("'stream' must be true or false")
    given = {name: value for name, value in body.items() if value is not None}
    parameters = parse_parameters(body.get("parameters"))
    parameters = replace(parameters, tools=read_tools(given), template_variables=read_template_variables(given))
    return Ask(
        caller=incoming.caller,
        session_id=session_id,
        prompt_text=prompt,
        images=images,
        parameters=parameters,
        invocation_id=incoming.invocation_id,
        form=_form(incoming, parameters, prompt, is_streaming),
        is_streaming=is_streaming,
        history=() if system is None else (Message(SYSTEM, (TextPart(system),)),),
        are_results=are_results,
    )


def _results(body: dict[str, Any]) -> str:
    """Read the results of the tools that the session's last answer called."""
    given = body["tool_results"]
    fields = {"tool_call_id", "content"}
    if body.get("prompt_text") is not None or not isinstance(given, list) or not given:
        raise InvalidRequest("'tool_results' must be a list of results, without 'prompt_text'", param="tool_results")
    if not all(isinstance(each, dict) and each.keys() == fields for each in given):
        raise InvalidRequest("a result of 'tool_results' must have 'tool_call_id' and 'content'", param="tool_results")
    if not all(isinstance(text, str) and is_unicode(text) for each in given for text in each.values()):
        raise InvalidRequest("'tool_results' must have texts of valid Unicode", param="tool_results")
    return write_results([Message(TOOL, (TextPart(each["content"]),), call_id=each["tool_call_id"]) for each in given])


def _form(incoming: Incoming, parameters: Parameters, prompt: str, is_streaming: bool) -> AnswerForm:
    """Choose a stream's form by Accept; whole answers have one form."""
    text_before = prompt if parameters.return_full_text else ""
    if is_streaming and incoming.accepts(TgiForm.content_type):
        return TgiForm(text_before=text_before, has_details=parameters.details)
    if is_streaming and incoming.accepts(LmiForm.content_type):
        return LmiForm(text_before=text_before, has_details=parameters.details)
    return SessionForm(text_before=text_before, has_details=parameters.details)


def _images(body: dict[str, Any]) -> tuple[ImageReference, ...]:
    found: list[Any] = [body[name] for name in ("path", "image") if body.get(name) is not None]
    several = body.get("images")
    if several is not None:
        if not isinstance(several, list):
            raise InvalidRequest("'images' must be a list of http(s) addresses, data URLs or base64 texts")
        found += several
    if any(not isinstance(image, str) or not image.strip() for image in found):
        raise InvalidRequest("an image must be an http(s) address, a data URL or base64 text")
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionForm:
    """Encodes plain text, or `{"response_text": ...}`.

    text_before: the question, if the client wants it repeated before the answer. has_details: add counts of tokens.
    """

    text_before: str = ""
    has_details: bool = False

    content_type = "text/plain; charset=utf-8"

    def begin(self) -> bytes:
        return self.text_before.encode()

    def token(self, token: Token, summary: Summary | None) -> bytes:
        return token.text.encode()

    def error(self, error: HandlerError) -> bytes:
        return ERROR_MARK + error.body()

    def whole(self, summary: Summary) -> bytes:
        body: dict[str, object] = {"response_text": self.text_before + summary.text}
        if summary.message is not None and summary.message.calls:
            calls = [
                {"id": call.id, "name": call.name, "input" if call.is_custom else "arguments": call.arguments}
                for call in summary.message.calls
            ]
            body = {"response_text": self.text_before + summary.message.content, "tool_calls": calls}
        if self.has_details:
            body["details"] = details_of(summary)
        return encode(body)
