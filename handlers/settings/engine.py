"""Settings of the engine: `handler.engine`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from handlers.settings.group import Count, HandlerGroup, Number, Positive, Size, from_text, refusal

GPU_CHUNK = 2048  # prompt tokens in one step on a GPU, unless prefill_chunk is set


class EngineSettings(HandlerGroup, title="engine"):
    """The engine, the batch of each step, and the length of prompts and answers."""

    name: Literal["builtin", "vllm"] = Field(
        "builtin", description="`builtin`, or `vllm`: vLLM's engine, in an environment of its own (docs/gpu.md)."
    )
    max_rows: Count = Field(64, description="Sequences in one engine step.")
    prefill_chunk: Size = Field(0, description="Prompt tokens in one step; 0: 512 on a CPU, 2,048 on a GPU.")
    max_stretch: Number = Field(
        1.7, gt=1, description="Longest time of a step with prompt tokens, as a multiple of a step without them."
    )
    gpu_step_s: Number = Field(
        0.05, ge=0, description="On a GPU, a step with prompt tokens may take this long in spite of max_stretch."
    )
    max_prompt_tokens: Size = Field(
        0, description="Tokens of a conversation including its question; 0: the model's own limit."
    )
    max_context_tokens: Size = Field(
        0, description="Tokens of a conversation including its answer; 0: the model's own limit."
    )
    max_new_tokens: Count = Field(256, description="Tokens of an answer, unless the client asks for another number.")
    max_new_tokens_limit: Annotated[int, from_text(int)] = Field(
        2048, description="Largest number of tokens that a client may ask for."
    )
    max_question_chars: Count = Field(
        500_000,
        description="Characters of a question, checked before it is tokenized.",
    )
    turn_timeout_s: Positive = Field(300.0, description="Longest time of a turn, from its arrival to its end.")
    num_threads: Count = Field(1, description="Threads of torch on a CPU.")
    prepare_threads: Count = Field(
        4, description="Threads that render and tokenize questions and record answers in the journal."
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        limit = self.max_new_tokens_limit
        if limit < self.max_new_tokens:
            raise refusal(
                "max_new_tokens_limit", f"must be at least max_new_tokens ({self.max_new_tokens}), not {limit}"
            )
        return self
