"""Continues an answer that another worker began, after its instance was lost.

Defines the start and the notes of torchmoor/wire/continuation.py. The start is the JSON of `AnswerStart`. A note has
the tokens that became text with its piece, each followed by a comma: the id and, if the record of the answer has log
probabilities, a colon and the token's own, and likewise each of the likeliest tokens after a semicolon. The first note
begins with BEGUN.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from handlers.errors import InvalidRequest
from handlers.requests.incoming import Incoming
from torchmoor.wire import continuation as wire_continuation
from torchmoor.wire import headers as wire

BEGUN = "^"


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """The values with which another worker can continue an answer.

    received_at: when the request arrived, in seconds since 1970, which the answer may contain. seed: the request's, or
    the one that the worker has drawn. num_cached: prompt tokens that were found in the cache, for the answer's usage.
    digest: of everything else that determines the answer; it must be equal at the other worker.
    """

    received_at: float
    seed: int | None
    num_cached: int
    digest: str

    def encode(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class GivenToken:
    """A token that the client has. logprob, top: as in TokenEvent, if the record of the answer has them."""

    id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()

    def encode(self, *, has_logprob: bool) -> str:
        pairs = [(self.id, self.logprob), *self.top]
        return ";".join(f"{token}:{logprob:.6g}" for token, logprob in pairs) if has_logprob else str(self.id)


def _read_token(text: str) -> GivenToken:
    pairs = [each.partition(":") for each in text.split(";")]
    own, *top = [(int(token), float(logprob or 0)) for token, _, logprob in pairs]
    return GivenToken(*own, tuple(top))


@dataclass(frozen=True, slots=True)
class Continuation:
    """The part of an answer that the client has. has_begun: the client also has what precedes the first token."""

    start: AnswerStart
    has_begun: bool
    tokens: tuple[GivenToken, ...]


def write_note(tokens: Sequence[GivenToken], *, is_first: bool, has_logprobs: bool) -> str:
    """Encode the tokens of one more piece for a note."""
    texts = [f"{token.encode(has_logprob=has_logprobs)}," for token in tokens]
    return (BEGUN if is_first else "") + "".join(texts)


def read_continuation(incoming: Incoming) -> tuple[Incoming, Continuation | None]:
    """Return the original request, and the Continuation if its answer is to be continued.

    Raises InvalidRequest.
    """
    length = incoming.headers.get(wire.CONTINUATION)
    if length is None:
        return incoming, None
    try:
        request, body = wire_continuation.split_request(int(length), incoming.body)
        start = AnswerStart(**json.loads(request.start))
        notes = request.notes.removeprefix(BEGUN)
        tokens = tuple(map(_read_token, notes.split(",")[:-1]))
    except (ValueError, TypeError, RecursionError) as exc:
        raise InvalidRequest("the request for the rest of an answer cannot be read") from exc
    headers = {**incoming.headers, "content-type": request.content_type}
    return replace(incoming, headers=headers, body=body), Continuation(start, notes != request.notes, tokens)
