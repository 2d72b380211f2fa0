"""An event of a session's journal."""

import hashlib
import secrets
from dataclasses import dataclass, field


class DamagedRecord(ValueError):
    """Raised if a record of the journal is not in the form that workers write. The message does not quote it."""


class EventTooLarge(Exception):
    """An event exceeds the setting journal.max_event_bytes. The message is for the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a session.

    kind: "open", "images", "queue", "begin", "end", "turn", "update", "delete" or "close". images: hashes of the
    images that it adds or, in a turn, that the question refers to, in order. question, answer: of a turn. system: the
    system message that the first turn brings. invocation_id: identifies a retry: the client's id, in a turn with the
    images that came with the question; of a "close", that of the request that closed the session.
    adapter: of an "open", the adapter that the request named; its session's questions go to it. Of a "queue" in a
    conversation, the one that answers.
    asked_by: "tool" if the question is the results of tools, as JSON; else empty.
    response: of a turn of OpenAI's Responses API, the response's fields as JSON; its question and answer are then lists
    of items as JSON. A turn that only adds items to a conversation has no answer, and `{}` as its response. Of an
    "open" or an "update", the conversation's fields. The question of a "delete" is the number of the deleted response,
    or that and the place of the deleted item; that of an "open" how many turns were copied from another session.
    A "queue" is a response in the background before it is a turn: its question and its response are those of the turn
    to be, its answer is the request's other fields as JSON. The response of an "end" says why there will be no turn.
    entry: of a "queue" in a conversation, the number of the entry that it reserves; also of its "begin", its "end" and
    its turn. A "begin" says that the model has the conversation up to here.
    nonce: distinguishes writes of equal content: a writer whose write timed out, and that finds the number taken,
    recognises its own event by it.
    """

    kind: str
    images: tuple[str, ...] = ()
    question: str = ""
    answer: str = ""
    system: str = ""
    response: str = ""
    asked_by: str = ""
    adapter: str = ""
    entry: str = ""
    invocation_id: str = ""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8), compare=False)

    @property
    def num_chars(self) -> int:
        """Characters of its texts, which its session keeps."""
        return len(self.question) + len(self.answer) + len(self.system) + len(self.response)


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raise DamagedRecord if a record is larger than any that a worker writes."""
    if num_bytes > max_bytes:
        raise DamagedRecord(f"a record has {num_bytes} bytes, over {max_bytes}")


def image_hash(data: bytes) -> str:
    """Return an encoded image's name in the journal."""
    return hashlib.sha256(data).hexdigest()
