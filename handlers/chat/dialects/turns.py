"""Turns of sessions in the dialects of `inputs` and `messages`: a request whose session header names one."""

from handlers.chat.commands import Ask, Generate, OpenAndAsk, opening_of
from handlers.chat.messages import TOOL, Message, Part, TextPart, images_of, split_images, write_results
from handlers.errors import InvalidRequest, SessionLimitReached
from handlers.requests.incoming import Incoming
from torchmoor.wire import headers as wire
from torchmoor.wire.headers import NEW_SESSION


def join_session(incoming: Incoming, request: Generate) -> Generate | Ask | OpenAndAsk:
    """Return the request as a turn of the session that the header names; unchanged without the header.

    Raises InvalidRequest, SessionLimitReached.
    """
    session_id = incoming.headers.get(wire.SESSION_ID)
    if not session_id:
        return request
    if request.num_choices > 1:
        raise InvalidRequest("'n' must be 1: a session has one answer to each question", param="n")
    if request.more_prompts:
        raise InvalidRequest("'prompt' must be one text: a session has one question at a time", param="prompt")
    parts, history, results = _question(request)
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    if results:
        parts = tuple(part for result in results for part in result.parts)
        text = write_results(results)
    if not text.strip():
        raise InvalidRequest("a turn of a session needs a question; images alone are added with add_images")
    ask = Ask(
        caller=request.caller,
        session_id=session_id,
        prompt_text=text,
        images=images_of(parts),
        history=history,
        are_results=bool(results),
        parameters=request.parameters,
        invocation_id=request.invocation_id,
        form=request.form,
        is_streaming=request.is_streaming,
    )
    if session_id != NEW_SESSION:
        return ask
    check_session_limit(incoming)
    return OpenAndAsk(opening=opening_of(ask), ask=ask)


def check_session_limit(incoming: Incoming) -> None:
    """Raise SessionLimitReached if the proxy says that the caller may not open another session."""
    if wire.SESSION_LIMIT in incoming.headers:
        raise limit_reached()


def limit_reached() -> SessionLimitReached:
    return SessionLimitReached("the caller has as many open sessions as it may have; close one or try again later")


def _question(request: Generate) -> tuple[tuple[Part, ...], tuple[Message, ...], tuple[Message, ...]]:
    """Return the parts of the question, the messages before it, and the results of tools if these are the question."""
    if request.prompt is not None:
        return split_images(request.prompt), (), ()
    *history, question = request.messages
    if question.role == TOOL:
        start = next((i for i in range(len(history), 0, -1) if history[i - 1].role != TOOL), 0)
        return (), tuple(history[:start]), (*history[start:], question)
    if question.role != "user":
        raise InvalidRequest(
            "the last message of a turn must be the user's question or the result of a tool", param="messages"
        )
    return question.parts, tuple(history), ()
