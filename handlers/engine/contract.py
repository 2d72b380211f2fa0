"""The interface between chat and an engine.

    builtin/   the built-in engine, exact and budgeted in bytes
    vllm/      vLLM, for GPUs

An engine's state is only a cache: the journal has every conversation as text and images, so a worker with another
engine can continue it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol

from PIL.Image import Image

from handlers.errors import HandlerError
from handlers.worker.counters import Counters
from torchmoor.wire.sampling_parameters import SAMPLING_NUMBERS, SamplingNumbers

WHITESPACE = " ?"  # between the tokens of JSON; without a bound a weak model would write nothing else
# llguidance's options of a JSON schema. They win over its own "x-guidance", which could make its keywords void.
JSON_OPTIONS: Any = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
}


class FinishReason(Enum):
    """Why generation ended. The values are TGI's."""

    EOS = "eos_token"
    LENGTH = "length"
    STOP = "stop_sequence"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A new token of a sequence, or the error that ended it (then `token_id` is None).

    top: the step's likeliest tokens with their log probabilities, the likeliest first, if the parameters ask for them;
    these and `logprob` are then the model's own, before penalties, temperature and cuts. num_cached: with the first
    token: how many positions of prompt and given tokens were found in the cache.
    """

    token_id: int | None
    logprob: float = 0.0
    finish_reason: FinishReason | None = None
    error: HandlerError | None = None
    top: tuple[tuple[int, float], ...] = ()
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A client's grammar as text: a JSON schema, a regular expression or a Lark grammar.

    field: the request's field that has it, for errors.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingNumbers):
    """Parameters for choosing the next token and for ending. Validated when the request is parsed.

    ignore_eos: an end token does not end the answer. min_tokens: no end token is chosen before the answer has this
    many tokens. grammar: a result of the engine's `compile_grammar`; it decides where the answer ends, so the two are
    not set with it.
    """

    max_new_tokens: int
    do_sample: bool = False
    temperature: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_n_tokens: int | None = None  # number of likeliest tokens in each event
    ignore_eos: bool = False
    grammar: Any = None

    @property
    def is_plain(self) -> bool:
        """True if the next token depends on the model and the answer's length alone."""
        penalties = [getattr(self, name) for name, row in SAMPLING_NUMBERS.items() if row.is_penalty]
        changes = (*penalties, self.grammar)
        return not self.do_sample and not self.logit_bias and all(each is None for each in changes)


class ImageFeatures(Protocol):
    """An image in the engine's form. Its length is its number of positions in a prompt.

    nbytes: memory, counted against the budget for images.
    """

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image that takes the prompt's positions from `start` on."""

    start: int
    features: ImageFeatures


class KvCache(Protocol):
    """The keys and values that an engine keeps of one conversation. Any thread."""

    @property
    def length(self) -> int:
        """Number of cached positions, as far as the engine knows before an answer begins."""
        ...

    @property
    def num_bytes(self) -> int:
        """Device memory in bytes; shared memory counts for each conversation. 0 if the engine does not report it."""
        ...

    @property
    def is_pinned(self) -> bool:
        """True if it holds memory that cannot be evicted."""
        ...

    @property
    def variant(self) -> str:
        """The variant of the last match."""
        ...

    def match(self, prompt: Sequence[int], variant: str = "") -> int:
        """Begin an answer to this prompt: keep the longest prefix that is stored, and return its length.

        variant: names what computes the answer beside the model, an adapter's version. Only what the same variant has
        computed is kept.
        """
        ...

    def pin(self) -> None:
        """Keep it from eviction until `unpin`."""
        ...

    def unpin(self, *, is_kept: bool = False) -> None:
        """End an answer's use: free memory that it reserved but did not use. is_kept: the rest stays pinned."""
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
        """Return the bytes of memory for this many positions."""
        ...

    def num_tokens(self, num_bytes: int) -> int:
        """Return how many positions fit into this many bytes."""
        ...

    def check_integrity(self, caches: Iterable[KvCache]) -> None:
        """Raise RuntimeError unless these caches and those that may be evicted account for the used memory."""
        ...


@dataclass(frozen=True, slots=True)
class KvPart:
    """A part of a sequence. All parts have the same length, except the last one.

    name: 32 bytes that identify all tokens and images up to the part's end. start, end: positions.
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
        """Seconds to compute a position; None before the first prompt."""
        ...

    def keys(self, cache: KvCache) -> list[int]:
        """Return the keys of the positions that the cache holds (see `AnswerRequest`)."""
        ...

    def name(self, keys: Sequence[int], digests: Mapping[int, str], variant: str) -> list[bytes]:
        """Name the prefixes of a sequence, one name per block.

        digests: of the images, by key; the names end at an image without digest. variant: see `KvCache.match`.
        """
        ...

    def split(self, names: Sequence[bytes]) -> list[KvPart]:
        """Return the parts of a sequence with these names."""
        ...

    def find(self, names: Sequence[bytes], number: int, num_bytes: int) -> KvPart | None:
        """Return the part of this number and size; None if a sequence with these names is too short for it."""
        ...

    def read(self, cache: KvCache, keys: Sequence[int], part: KvPart, variant: str) -> bytes | None:
        """Return a part's content; None if the cache no longer holds it."""
        ...

    def write(self, cache: KvCache, keys: Sequence[int], part: KvPart, content: memoryview) -> None:
        """Append a part to a cache that holds everything before it. Raises OutOfMemory."""
        ...


class Adapter(Protocol):
    """A LoRA adapter in the engine's memory: a variant of its model that answers may name. Any thread."""

    @property
    def version(self) -> str:
        """A digest of its files."""
        ...

    @property
    def num_bytes(self) -> int: ...

    def drop(self) -> None:
        """Free the memory. No answer may use it then."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """A request for an answer.

    prompt: one key per position: a token id, or a negative number that identifies an image at all of its positions. So
    two prompts are equal at a position only if they have the same token or image there. images: in order, those
    with a position that the conversation's cache does not have. deadline: by the monotonic clock; the answer then ends
    with TurnTimedOut. on_event: called on the engine's thread for each token; it returns False to end the answer there.
    wake: called on the engine's thread after events, once for all answers with the same `wake`. given: the beginning of
    the answer, which another worker has generated. adapter: computes the answer; the cache has matched the prompt
    with its version as the variant.
    """

    prompt: list[int]
    images: list[PlacedImage]
    params: SamplingParams
    deadline: float
    on_event: Callable[[TokenEvent], bool]
    wake: Callable[[], None] | None = None
    given: Sequence[int] = ()
    adapter: Adapter | None = None


Cancel = Callable[[HandlerError], None]
"""Ends an answer within one step, its last event being this error; does nothing if the answer has ended. Any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do with its model.

    is_packed: a step computes its answers together. can_resume: sampled answers continue from `given` exactly; plain
    ones (`SamplingParams.is_plain`) always do. has_equal_images: all images have the same number of positions.
    image_side: the length to which images are scaled, of their shorter side; None: it depends on the image. refused:
    names of SamplingParams that the engine lacks.
    """

    engine: str
    device: str
    max_context: int
    is_packed: bool
    can_resume: bool
    has_grammars: bool
    has_equal_images: bool
    image_side: int | None
    refused: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class EngineNumbers:
    """Counts for the status. steps: since the start. rows: running answers. queued: answers that wait for room."""

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

    def encode(self, image: Image) -> ImageFeatures:
        """Convert an RGB image for prompts; takes long. Raises OutOfMemory, BadImage."""
        ...

    def compile_grammar(self, source: GrammarText) -> Any:
        """Prepare a grammar for `SamplingParams`; takes long. Raises InvalidRequest, Overloaded."""
        ...

    def load_adapter(self, folder: Path) -> Adapter:
        """Read PEFT's folder; takes long. Raises ModelBroken, OutOfMemory."""
        ...

    def submit(self, cache: KvCache, request: AnswerRequest) -> Cancel:
        """Queue a request, which begins when there is room.

        cache: has matched the prompt; no other answer may use it.
        """
        ...
