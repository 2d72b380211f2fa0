"""Samples the next tokens of a step's rows together, each with its row's own parameters and random state.

Every choice equals that of the row alone by transformers' warpers and torch.multinomial, whatever else is in the step.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from handlers.engine.sequence import SamplingParams

MIN_TEMPERATURE = 1e-6  # below it logits overflow float32; it is greedy already


class Sampler:
    """Holds a row's parameters, random state and penalized tokens.

    context: the row's token ids so far; negative ones, which name images, are not penalized.
    """

    def __init__(self, params: SamplingParams, context: Sequence[int], device: torch.device) -> None:
        self.generator: torch.Generator | None = None
        self.temperature = 1.0
        self.warpers = LogitsProcessorList()
        self.cuts = (params.top_k, params.top_p, params.typical_p)  # rows with equal ones have equal warpers
        self.penalty = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        if not self.penalty > 0:
            raise ValueError("repetition_penalty must be positive")
        self._context = context if self.penalty != 1.0 else ()
        self._is_said: Tensor | None = None
        if params.do_sample:
            self.generator = torch.Generator(device)
            if params.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(params.seed)
            self.temperature = max(params.temperature, MIN_TEMPERATURE)
            if params.top_k:
                self.warpers.append(TopKLogitsWarper(params.top_k))
            if params.top_p is not None and params.top_p < 1.0:
                self.warpers.append(TopPLogitsWarper(params.top_p))
            if params.typical_p is not None and params.typical_p < 1.0:
                self.warpers.append(TypicalLogitsWarper(params.typical_p))

    @property
    def is_plain_greedy(self) -> bool:
        """True if the choice is the largest logit, which the engine takes for all such rows at once."""
        return self.generator is None and self.penalty == 1.0

    def penalize(self, logits: Tensor) -> Tensor:
        """Return the logits with the penalty on tokens that the row has. logits: (vocabulary,)."""
        if self._is_said is None:
            self._is_said = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
            self._is_said[[token for token in self._context if token >= 0]] = True
        penalized = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(self._is_said, penalized, logits)

    def note(self, token: int) -> None:
        """Penalize this token from now on."""
        if self._is_said is not None:
            self._is_said[token] = True


@torch.inference_mode()
def choose_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> tuple[list[int], list[float]]:
    """Return each row's next token and its log probability after warping, which is not finite if the row has failed.

    logits: (rows, vocabulary) float32, a row for each sampler.
    """
    if any(sampler.penalty != 1.0 for sampler in samplers):
        logits = logits.clone()
    for row, sampler in enumerate(samplers):
        if sampler.penalty != 1.0:
            logits[row] = sampler.penalize(logits[row])
    logits = logits / torch.tensor([[sampler.temperature] for sampler in samplers], device=logits.device)
    for rows in _group_by_warpers(samplers):
        warpers = samplers[rows[0]].warpers
        logits[rows] = warpers(None, logits[rows])  # type: ignore[arg-type]  # these do not look at token ids
    scores = torch.log_softmax(logits, dim=-1)
    # The largest quotient is a draw: torch.multinomial divides by the same noise when it draws one token.
    weights, noise = scores.exp(), torch.ones_like(scores)
    for row, sampler in enumerate(samplers):
        if sampler.generator is None:
            weights[row] = scores[row]
        else:
            noise[row].exponential_(1, generator=sampler.generator)
    chosen = weights.div_(noise).argmax(dim=-1, keepdim=True)
    tokens: list[int] = chosen[:, 0].tolist()
    for sampler, token in zip(samplers, tokens, strict=True):
        sampler.note(token)
    return tokens, scores.gather(1, chosen)[:, 0].tolist()


def _group_by_warpers(samplers: Sequence[Sampler]) -> Iterable[list[int]]:
    """Return the rows that have warpers, those with equal ones together."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for row, sampler in enumerate(samplers):
        if sampler.warpers:
            groups[sampler.cuts].append(row)
    return groups.values()
