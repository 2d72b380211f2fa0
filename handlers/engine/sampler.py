"""Samples the next token of a row with the row's own parameters, by transformers' warpers."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from handlers.engine.sequence import SamplingParams

MIN_TEMPERATURE = 1e-6  # below it logits overflow float32; it is greedy already


class Sampler:
    """Holds a sequence's random state, so that the same seed gives the same answer whatever else runs."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self.generator: torch.Generator | None = None
        self.processors = LogitsProcessorList()
        if params.repetition_penalty is not None and params.repetition_penalty != 1.0:
            self.processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        if not params.do_sample:
            return
        self.generator = torch.Generator(device)
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed)
        if params.temperature != 1.0:
            self.processors.append(TemperatureLogitsWarper(max(params.temperature, MIN_TEMPERATURE)))
        if params.top_k:
            self.processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p is not None and params.top_p < 1.0:
            self.processors.append(TopPLogitsWarper(params.top_p))
        if params.typical_p is not None and params.typical_p < 1.0:
            self.processors.append(TypicalLogitsWarper(params.typical_p))

    @property
    def is_plain_greedy(self) -> bool:
        """True if the choice is the largest logit, which the engine takes for all such rows at once."""
        return self.generator is None and not self.processors

    def choose(self, logits: Tensor, context: list[int]) -> tuple[int, float]:
        """Return the next token and its log probability after warping.

        logits: (vocabulary,) float32; context: the token ids so far, for the repetition penalty.
        """
        ids: Any = torch.tensor([context], device=logits.device)
        row: Any = logits[None].clone()
        scores = torch.log_softmax(self.processors(ids, row), dim=-1)
        if self.generator is None:
            token = scores.argmax(dim=-1)
        else:
            token = torch.multinomial(scores.exp(), 1, generator=self.generator)[0]
        return int(token), float(scores[0, token])
