"""The state of one answer in generation: prompt, cache, parameters and tokens."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from handlers.engine.builtin.kv_cache import SequenceCache
from handlers.engine.contract import SamplingParams, TokenEvent
from handlers.models.lora import LoraAdapter


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where an image stands in a prompt: `features` (tokens, hidden size) take the positions from `start` on."""

    start: int
    features: Tensor

    @property
    def length(self) -> int:
        return len(self.features)


class Sequence:
    """A token sequence in the engine, owned by the engine thread from `Engine.submit` to the last event.

    prompt: one key per position: a token id, or a negative number that identifies an image at all of its positions. So
    two prompts are equal at a position only if they have the same token or image there. images: those with a position
    that is not in the cache yet. on_event: called on the engine thread for each token; it returns False to end the
    sequence there. wake: called on the engine thread after a step's events, once for all sequences with the same
    `wake`. given: the beginning of the answer, which another engine has generated. num_cached: positions of the prompt
    that were in the cache when the sequence was created. adapter: that computes it; set before `Engine.submit`.
    """

    def __init__(
        self,
        prompt: list[int],
        images: list[ImageSpan],
        cache: SequenceCache,
        params: SamplingParams,
        deadline: float,
        on_event: Callable[[TokenEvent], bool],
        wake: Callable[[], None] | None = None,
        given: Iterable[int] = (),
    ) -> None:
        self.prompt = prompt
        self.images = list(images)
        self.cache = cache
        self.params = params
        self.deadline = deadline
        self.on_event = on_event
        self.wake = wake
        self.output = list(given)
        self.num_given = len(self.output)
        self.num_cached = cache.length
        self.adapter: LoraAdapter | None = None
        self.arrived = 0  # the scheduler's counter at its arrival, and at its first token
        self.began = 0

    def __repr__(self) -> str:
        return f"<Sequence {self.cache.length}/{len(self.prompt)} prompt, {len(self.output)} new>"

    @property
    def num_new(self) -> int:
        """Number of tokens that this engine has generated."""
        return len(self.output) - self.num_given

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def max_tokens(self) -> int:
        """Maximum of positions in its cache; the last new token is never stored."""
        return len(self.prompt) + self.params.max_new_tokens - 1

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not yet in the cache: more than one while prefilling, one while decoding."""
        return self.num_tokens - self.cache.length

    @property
    def is_prefilling(self) -> bool:
        return self.cache.length < len(self.prompt) + self.num_given

    def pending(self, limit: int) -> list[int]:
        """Return the next tokens to compute, at most `limit`."""
        start = self.cache.length
        if start >= len(self.prompt):
            return self.output[start - len(self.prompt) :][:limit]
        return (self.prompt[start:] + self.output)[:limit] if self.output else self.prompt[start : start + limit]
