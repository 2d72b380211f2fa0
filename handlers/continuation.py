"""The continuation of an answer that another worker began and whose instance was lost.

The start and the notes of torchmoor/wire/continuation.py: the start is the JSON of `AnswerStart`; a note has the ids of
the tokens that became text with the piece, each with a comma, after BEGUN in the note of the first piece.
"""

import json
from dataclasses import asdict, dataclass, replace

from handlers.errors import InvalidRequest
from handlers.requests import Incoming
from torchmoor.wire import continuation as wire_continuation
from torchmoor.wire import headers as wire

BEGUN = "^"


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """What an answer begins with.

    received_at: of the request, in seconds since 1970, as the answer may show it. seed: of the answer's random numbers,
    which the worker has drawn if the request has none. num_cached: tokens of the prompt that were not computed, for the
    answer's usage. digest: of all else that the answer follows from, which must be equal where it is continued.
    """

    received_at: float
    seed: int | None
    num_cached: int
    digest: str

    def encode(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the client has of the answer. has_begun: it has what precedes the first token."""

    start: AnswerStart
    has_begun: bool
    tokens: tuple[int, ...]


def write_note(tokens: list[int], *, is_first: bool) -> str:
    """Encode what the client has of the answer with one more piece."""
    return (BEGUN if is_first else "") + "".join(f"{token}," for token in tokens)


def read_continuation(incoming: Incoming) -> tuple[Incoming, Continuation | None]:
    """Return the original request, and what its client has of the answer if that is to be continued.

    Raises InvalidRequest.
    """
    length = incoming.headers.get(wire.CONTINUATION)
    if length is None:
        return incoming, None
    try:
        if not isinstance(incoming.body, bytes):
            raise TypeError("not bytes")
        request, body = wire_continuation.split_request(int(length), incoming.body)
        start = AnswerStart(**json.loads(request.start))
        notes = request.notes.removeprefix(BEGUN)
        tokens = tuple(int(token) for token in notes.split(",")[:-1])
    except (ValueError, TypeError, RecursionError) as exc:
        raise InvalidRequest("the request for the rest of an answer cannot be read") from exc
    headers = {**incoming.headers, "content-type": request.content_type}
    return replace(incoming, headers=headers, body=body), Continuation(start, notes != request.notes, tokens)
