"""Ids of OpenAI's responses, conversations and items: each names a session and a place in it.

    resp_{session}_{number}            an entry of the session, from 1: a question with its answer
    conv_{session}                     the session itself, of a conversation
    cmp_{session}, file-{session}      the same, of a compacted conversation, and of a file
    msg_{session}_{number}_{place}     an item of an entry, from 0; fc_ or ctc_ for a call, rs_ for reasoning
    file-{session}_{number}_{place}    an image in an entry's items, from 0

An item is found by its place only: calls and reasoning had msg_, too, in earlier versions.
session: the session's id without `ts-seq-`. Because its MAC authenticates ids of every kind, each proxy finds the
instance of a response without shared state.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from urllib.parse import unquote

from torchmoor.wire.session_ids import MAX_ID_LENGTH, PREFIX

_RESPONSE, _CONVERSATION, _COMPACTION, _FILE = "resp_", "conv_", "cmp_", "file-"
_ITEM, _ITEMS = "msg_", {"function_call": "fc_", "custom_tool_call": "ctc_", "reasoning": "rs_"}  # by type
_NUMBER = r"(0|[1-9][0-9]{0,5})"
_SESSION = rf"([a-z0-9-]{{1,{MAX_ID_LENGTH - len(PREFIX)}}})"


class Place(NamedTuple):
    """The session and entry that an id names.

    session_id: not verified. number: the entry's, 0 for all entries. item: its place in the entry, or the image's place
    in the entry's items.
    """

    session_id: str
    number: int = 0
    item: int = 0


def response_id(session_id: str, number: int) -> str:
    return f"{_RESPONSE}{session_id.removeprefix(PREFIX)}_{number}"


def conversation_id(session_id: str) -> str:
    return f"{_CONVERSATION}{session_id.removeprefix(PREFIX)}"


def compaction_id(session_id: str) -> str:
    return f"{_COMPACTION}{session_id.removeprefix(PREFIX)}"


def file_id(session_id: str) -> str:
    return f"{_FILE}{session_id.removeprefix(PREFIX)}"


def image_id(session_id: str, number: int, place: int) -> str:
    """Return the id by which an input names an image of stored items, as it names a file."""
    return f"{file_id(session_id)}_{number}_{place}"


def item_id(session_id: str, number: int, item: int, kind: str) -> str:
    """Return the id of an item. kind: its type."""
    return f"{_ITEMS.get(kind, _ITEM)}{session_id.removeprefix(PREFIX)}_{number}_{item}"


def _read(form: re.Pattern[str], text: str) -> Place | None:
    match = form.fullmatch(text)
    return None if match is None else Place(PREFIX + match[1], *map(int, match.groups()[1:]))


def _reader(form: str) -> Callable[[str], Place | None]:
    """Return a function that reads the ids of one kind; it returns None for any other text."""
    return partial(_read, re.compile(form, re.ASCII))


read_response_id = _reader(rf"{_RESPONSE}{_SESSION}_{_NUMBER}")
read_conversation_id = _reader(rf"{_CONVERSATION}{_SESSION}")
read_compaction_id = _reader(rf"{_COMPACTION}{_SESSION}")
read_file_id = _reader(rf"{_FILE}{_SESSION}")
read_image_id = _reader(rf"{_FILE}{_SESSION}_{_NUMBER}_{_NUMBER}")  # of stored items
read_item_id = _reader(rf"(?:{'|'.join((_ITEM, *_ITEMS.values()))}){_SESSION}_{_NUMBER}_{_NUMBER}")


def read_id(text: str) -> Place | None:
    """Read the id of a response, conversation, file or image; None for any other text."""
    return read_response_id(text) or read_conversation_id(text) or read_file_id(text) or read_image_id(text)


def read_resource_path(path: str) -> Place | None:
    """Read a path below /v1/, such as responses/{id}; None if it names no resource, or one that cannot exist."""
    parts = path.split("/")
    return read_id(unquote(parts[1])) if len(parts) > 1 else None
