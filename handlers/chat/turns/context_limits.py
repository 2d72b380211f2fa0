"""Limits on the length of a conversation and of its answer."""

from dataclasses import dataclass

from handlers.chat.parameters import Parameters
from handlers.chat.turns.detokenizer import REPLACEMENT
from handlers.engine.contract import KvPool
from handlers.errors import PROMPT_TOO_LONG, ContextTooLong, InvalidRequest
from handlers.models.prompt_format import PromptFormat
from handlers.settings.engine import EngineSettings
from handlers.settings.session import ChatSessionSettings


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """The lengths that the model, the settings and the memory for keys and values allow."""

    engine: EngineSettings
    session: ChatSessionSettings
    max_of_model: int  # tokens
    pool: KvPool

    @property
    def max_context(self) -> int:
        """The maximum of tokens of prompt and answer together."""
        return min(self.engine.max_context_tokens or self.max_of_model, self.max_of_model)

    @property
    def max_prompt(self) -> int:
        """The maximum of a prompt's tokens that leaves room for an answer."""
        return min(self.engine.max_prompt_tokens or self.max_context - 1, self.max_context - 1)

    @property
    def max_bytes(self) -> int:
        """The maximum of device memory for a conversation and its answer, in bytes."""
        return min(self.pool.capacity_bytes, self.session.max_session_bytes or self.pool.capacity_bytes)

    def check_chars(self, num_chars: int, described: str) -> None:
        """Raise ContextTooLong for a text too long to tokenize, which takes a second per megabyte.

        described: "the question has {} characters".
        """
        limit = self.engine.max_question_chars
        if num_chars > limit:
            raise ContextTooLong(f"{PROMPT_TOO_LONG}: {described.format(num_chars)}, more than {limit}")

    def max_prompt_beside_answer(self, wanted: int | None) -> int:
        """Return the maximum of a prompt's tokens that leaves `wanted`, but at most half, for the answer."""
        room = min(self.max_context, self.pool.num_tokens(self.max_bytes))
        return min(self.max_prompt, room - min(wanted or self.engine.max_new_tokens, room // 2))

    def max_new_tokens(self, num_prompt_tokens: int, parameters: Parameters) -> int:
        """Return the maximum of an answer's tokens after this prompt. Raises ContextTooLong, InvalidRequest."""
        if num_prompt_tokens > self.max_prompt:
            raise ContextTooLong(
                f"{PROMPT_TOO_LONG}: the conversation has {num_prompt_tokens} tokens and this model reads at most "
                f"{self.max_prompt}; shorten it or open a new session"
            )
        wanted, longest = parameters.max_new_tokens or self.engine.max_new_tokens, self.engine.max_new_tokens_limit
        if wanted > longest:
            field = parameters.length_field
            raise InvalidRequest(f"{field} must be at most {longest}, not {wanted}", param=field)
        max_new_tokens = min(wanted, self.max_context - num_prompt_tokens)
        limit = self.max_bytes
        if parameters.max_new_tokens is None:  # the default may be reduced
            max_new_tokens = max(1, min(max_new_tokens, self.pool.num_tokens(limit) - num_prompt_tokens))
        num_bytes = self.pool.num_bytes(num_prompt_tokens + max_new_tokens)
        if num_bytes > limit:
            raise ContextTooLong(
                f"{PROMPT_TOO_LONG}: {num_prompt_tokens} tokens and an answer of {max_new_tokens} take {num_bytes} "
                f"bytes of device memory, more than the {limit} that one conversation may have; shorten it or ask for "
                "a shorter answer"
            )
        least = parameters.min_tokens or 0
        if least > max_new_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most {max_new_tokens}, the maximum length of this answer, not {least}",
                param="min_tokens",
            )
        return max_new_tokens


def truncate(model: PromptFormat, text: str, max_tokens: int | None, *, is_raw: bool = False) -> str:
    """Return the text's last `max_tokens` tokens, without a part of a character at their beginning.

    is_raw: keep special tokens, which a raw prompt may use.
    """
    if max_tokens is None:
        return text
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) <= max_tokens:
        return text
    kept = str(model.tokenizer.decode(ids[-max_tokens:], skip_special_tokens=not is_raw))
    return kept if text.endswith(kept) else kept.lstrip(REPLACEMENT) or kept
