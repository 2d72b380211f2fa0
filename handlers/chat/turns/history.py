"""A session's conversation as messages: compares a client's repetition with it, and removes the oldest turns."""

from collections.abc import Sequence
from typing import Any

from handlers.chat.messages import ASSISTANT, SYSTEM, USER, Message
from handlers.errors import InvalidRequest
from handlers.models.answer_style import AnswerStyle


def read_system(
    repeated: Sequence[Message], held: Sequence[dict[str, Any]], num_dropped: int, style: AnswerStyle
) -> str:
    """Return the system message of a session's first question; "" without one, and for later questions.

    repeated: the messages that the client sends before its question: none, or the conversation so far, with or without
    its system message. held: the session's own messages, without the first `num_dropped` turns. style: of its answers.
    Raises InvalidRequest if the two differ.
    """
    given = [message.for_template() for message in repeated]
    given_system, given_turns = split_system(given)
    held_system, held_turns = split_system(held)
    if not held:
        if given_turns:
            raise InvalidRequest(
                "a session begins with its first question: before it only a system message is allowed", param="messages"
            )
        return "".join(map(_text, given_system))
    is_same_system = not given_system or _are_same(given_system, held_system, style)
    starts = [*_starts(given_turns), len(given_turns)]
    given_held = given_turns[starts[min(num_dropped, len(starts) - 1)] :]
    if not is_same_system or (given_turns and not _are_same(given_held, held_turns, style)):
        raise InvalidRequest(
            "the messages before the question are not this session's conversation; send the question alone",
            param="messages",
        )
    return ""


def split_system(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split messages into the system messages at their beginning and the turns."""
    num_system = next((i for i, each in enumerate(messages) if each["role"] != SYSTEM), len(messages))
    return list(messages[:num_system]), list(messages[num_system:])


def count_turns(messages: Sequence[dict[str, Any]]) -> int:
    """Count the turns. A turn begins after the assistant's messages of the previous one."""
    return len(_starts(split_system(messages)[1]))


def without_oldest(messages: Sequence[dict[str, Any]], num_turns: int) -> list[dict[str, Any]]:
    """Remove the first turns, fewer than all, and put their images before the first remaining question."""
    system, turns = split_system(messages)
    start = _starts(turns)[num_turns]
    dropped, left = turns[:start], turns[start:]
    images = [part for message in dropped for part in message["content"] if part["type"] == "image"]
    first = next((i for i, each in enumerate(left) if each["role"] == USER), 0)
    left[first] = {**left[first], "content": [*images, *left[first]["content"]]}
    return [*system, *left]


def _starts(turns: Sequence[dict[str, Any]]) -> list[int]:
    """Return the index of each turn's first message."""
    roles = [message["role"] for message in turns]
    return [i for i, role in enumerate(roles) if i == 0 or (role != ASSISTANT and roles[i - 1] == ASSISTANT)]


def _are_same(given: Sequence[dict[str, Any]], held: Sequence[dict[str, Any]], style: AnswerStyle) -> bool:
    """Compare roles and texts; clients that repeat messages may omit images and reasoning, and trim texts.

    The session stores a tool call as the model's text, and the client repeats it as a call. So only the call's position
    is compared.
    """
    pairs = zip(given, held, strict=False)
    return len(given) == len(held) and all(
        a["role"] == b["role"] and ("tool_calls" in a or _text(a).strip() in _shown(b, style)) for a, b in pairs
    )


def _shown(held: dict[str, Any], style: AnswerStyle) -> set[str]:
    """Return the texts that a client may have of a message: an answer's reasoning is in a field of its own."""
    text = _text(held)
    shown = {text.strip()}
    if style.thought is not None and held["role"] == ASSISTANT:
        shown.add(text.partition(style.thought[1])[2].strip())  # empty if the reasoning did not end
    return shown


def _text(message: dict[str, Any]) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")
