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

    The fields by kind; a field that is not listed is empty:
        open    adapter: answers the session's questions. response: fields of an OpenAI conversation or file. question:
                number of turns that were copied from another session.
        images  images: hashes of the added images.
        turn    question, answer. images: hashes of the question's images, in order. system: the first turn's system
                message. asked_by: "tool" if the question is JSON with the results of tools. Of the Responses API,
                response has the response's fields, and question and answer are lists of items, all as JSON; a turn
                that only adds items has the response `{}` and no answer.
        queue   a response in the background before it is a turn. question, response, images: as in its turn. answer:
                the request's other fields as JSON. adapter: in a conversation, the one that answers.
        begin   the model has read the conversation up to here.
        end     response: why the queued response gets no turn.
        update  response: the conversation's new fields.
        delete  question: number of the deleted response, or that and the place of the deleted item.
        close   invocation_id: the request that closed the session.
    entry: in a conversation, the number of the entry that a "queue" reserves; also in its "begin", "end" and "turn".
    invocation_id: the client's id of the request, by which a retry is recognised; in a turn, together with its images.
    nonce: differs between writes of equal content. A writer that timed out and finds the number taken recognises its
    own event by it.
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
