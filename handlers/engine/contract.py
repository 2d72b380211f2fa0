"""What chat needs from an engine, and all that it may use.

    builtin/   our own engine, exact and budgeted in bytes
    vllm/      vLLM's, for GPUs

An engine keeps state only to save work: the journal has every conversation as text and pictures, so that a worker with
another engine can continue it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol

from PIL.Image import Image as Picture

from handlers.counters import Counters

WHITESPACE = " ?"  # between the tokens of JSON; without a bound a weak model would write nothing else
# llguidance's options of a JSON schema. They win over its own "x-guidance", which could make its keywords void.
JSON_OPTIONS: Any = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
}


class FinishReason(Enum):
    """Why generation ended; the values are the words of the TGI protocol."""

    EOS = "eos_token"
    LENGTH = "length"
    STOP = "stop_sequence"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A sequence got one more token, or ended by an error (then `token_id` is None).

    top: the step's likeliest tokens with their log probabilities, the likeliest first, if the parameters ask for them;
    these and `logprob` are then the model's own, before penalties, temperature and cuts.
    num_cached: with the first token: how many positions of prompt and given tokens were not computed.
    """

    token_id: int | None
    logprob: float = 0.0
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    top: tuple[tuple[int, float], ...] = ()
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar as the client wrote it: a JSON schema, a regular expression or a Lark grammar.

    field: the client's name of it, for errors.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to end. Validated where the request is parsed.

    grammar: what the engine's `compile_grammar` has returned.
    """

    max_new_tokens: int
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    top_n_tokens: int | None = None  # the likeliest tokens that each event has
    grammar: Any = None

    @property
    def is_plain(self) -> bool:
        """True if the next token depends on the model alone."""
        changes = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty, self.grammar)
        return not self.do_sample and not self.logit_bias and all(each is None for each in changes)


class PictureFeatures(Protocol):
    """A picture in the form that the engine reads. Its length is the number of positions that it takes in a prompt.

    nbytes: memory, counted against the budget for pictures.
    """

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture that takes the prompt's positions from `start` on."""

    start: int
    features: PictureFeatures


class KvCache(Protocol):
    """The keys and values that an engine keeps of one conversation. Any thread."""

    @property
    def length(self) -> int:
        """Positions that the next answer need not compute, as far as the engine knows before it begins."""
        ...

    @property
    def num_bytes(self) -> int:
        """Device memory; what several conversations share counts for each of them. 0 if the engine cannot tell."""
        ...

    @property
    def is_pinned(self) -> bool:
        """True if it holds memory that cannot be evicted."""
        ...

    def match(self, prompt: Sequence[int]) -> int:
        """Begin an answer to this prompt: keep the longest prefix that is stored, and return its length."""
        ...

    def pin(self) -> None:
        """Keep it from eviction until `unpin`."""
        ...

    def unpin(self, *, is_kept: bool = False) -> None:
        """An answer is over: free what holds nothing. The rest may be evicted unless it is kept."""
        ...

    def drop(self) -> None:
        """Forget everything and free the memory."""
        ...


class KvPool(Protocol):
    """The engine's memory for keys and values. Any thread. can_pin: `KvCache.pin` has an effect."""

    @property
    def can_pin(self) -> bool: ...

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def num_evicted(self) -> int:
        """Caches that have lost their memory to others."""
        ...

    def open(self, scope: str) -> KvCache:
        """Return an empty cache. Caches share memory only within a scope."""
        ...

    def num_bytes(self, num_tokens: int) -> int:
        """Return the memory that this many positions take."""
        ...

    def num_tokens(self, num_bytes: int) -> int:
        """Return how many positions fit into this much memory."""
        ...

    def check_integrity(self, caches: Iterable[KvCache]) -> None:
        """Raise RuntimeError unless these caches and those that may be evicted account for the used memory."""
        ...


@dataclass(frozen=True, slots=True)
class KvPart:
    """A part of a sequence, as long as all others unless it is the last one.

    name: 32 bytes, stand for all that precedes the part's end. start, end: positions.
    """

    name: bytes
    start: int
    end: int


class KvParts(Protocol):
    """Reads and writes parts of KV caches as bytes, to store them elsewhere. Any thread but the engine's."""

    @property
    def length(self) -> int:
        """Positions of a part that is not the last one."""
        ...

    @property
    def max_bytes(self) -> int: ...

    @property
    def token_s(self) -> float | None:
        """Seconds that it takes to compute a position instead; None before the first prompt."""
        ...

    def keys(self, cache: KvCache) -> list[int]:
        """Return the keys of the positions that the cache holds (see `AnswerRequest`)."""
        ...

    def name(self, keys: Sequence[int], digests: Mapping[int, str]) -> list[bytes]:
        """Name the beginnings of a sequence. digests: of the pictures, by their keys; the names end where one lacks."""
        ...

    def split(self, names: Sequence[bytes]) -> list[KvPart]:
        """Return the parts of a sequence with these names."""
        ...

    def find(self, names: Sequence[bytes], number: int, num_bytes: int) -> KvPart | None:
        """Return the part of this number and size, if a sequence with these names is that long."""
        ...

    def read(self, cache: KvCache, keys: Sequence[int], part: KvPart) -> bytes | None:
        """Return a part's content; None if the cache does not hold it any more."""
        ...

    def write(self, cache: KvCache, keys: Sequence[int], part: KvPart, content: memoryview) -> None:
        """Extend a cache, which holds all before this part, by the part. Raises OutOfMemory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """What an engine generates from.

    prompt: one key a position: a token id, or for a picture's position a negative number that names the picture, so
    that two prompts are equal in a position only if the same token or picture stands there.
    pictures: in order, those with a position that the conversation's cache does not have.
    deadline: by the monotonic clock; the answer then ends with TurnTimedOut.
    on_event: called on the engine's thread for each token; it returns False to end the answer there.
    wake: called on the engine's thread after events, once for all answers with the same one.
    given: the beginning of the answer, which another worker has generated.
    """

    prompt: list[int]
    pictures: list[PlacedPicture]
    params: SamplingParams
    deadline: float
    on_event: Callable[[TokenEvent], bool]
    wake: Callable[[], None] | None = None
    given: Sequence[int] = ()


Cancel = Callable[[Exception], None]
"""Ends an answer within one step, its last event being this error; does nothing if the answer has ended. Any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do with its model.

    is_packed: a step computes its answers together. can_resume: answers that are not plain (`SamplingParams.is_plain`)
    go on from `given` as if they had not been interrupted; plain ones always do. has_equal_pictures: every picture
    takes the same number of positions. refused: names of SamplingParams that the engine lacks.
    """

    engine: str
    device: str
    max_context: int
    is_packed: bool
    can_resume: bool
    has_grammars: bool
    has_equal_pictures: bool
    refused: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class EngineNumbers:
    """steps: since the start. rows: answers that are computed; queued: those that wait for room."""

    steps: int
    rows: int
    queued: int


class ChatEngine(Protocol):
    """Generates answers. Any thread, unless a method says otherwise. kv_parts: None if its caches cannot be stored."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def pool(self) -> KvPool: ...

    @property
    def kv_parts(self) -> KvParts | None: ...

    @property
    def counters(self) -> Counters:
        """The worker's counters, to which chat adds its own."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """End running answers with an error and free the device's memory."""
        ...

    def numbers(self) -> EngineNumbers: ...

    def encode(self, picture: Picture) -> PictureFeatures:
        """Convert an RGB picture for prompts; takes long. Raises OutOfMemory, BadImage."""
        ...

    def compile_grammar(self, source: GrammarText) -> Any:
        """Prepare a grammar for `SamplingParams`; takes long. Raises InvalidRequest, Overloaded."""
        ...

    def submit(self, cache: KvCache, request: AnswerRequest) -> Cancel:
        """Begin to generate when there is room. cache: has matched the prompt, and must not begin another answer."""
        ...
