"""The state of one answer in generation: prompt, cache, parameters and tokens."""

from handlers.engine.builtin.kv_cache import SequenceCache
from handlers.engine.contract import AnswerRequest, KvCache
from handlers.models.lora import LoraAdapter


class TokenSequence:
    """One answer in the engine, owned by the engine thread from `Engine.submit` to the last event.

    cache: the conversation's, matched with the prompt. num_cached: positions of the prompt that the match found. The
    other attributes are the request's, see `AnswerRequest`.
    """

    def __init__(self, cache: KvCache, request: AnswerRequest) -> None:
        assert isinstance(cache, SequenceCache)  # the pool has opened it
        assert isinstance(request.adapter, LoraAdapter | None)  # the engine has loaded it
        self.cache = cache
        self.prompt = request.prompt
        self.images = list(request.images)
        self.params = request.params
        self.deadline = request.deadline
        self.on_event = request.on_event
        self.wake = request.wake
        self.output = list(request.given)
        self.num_given = len(self.output)
        self.adapter = request.adapter
        self.num_cached = cache.length
        self.arrived = 0  # the scheduler's counter at its arrival, and at its first token
        self.began = 0

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
