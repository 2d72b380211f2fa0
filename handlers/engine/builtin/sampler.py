"""Samples the next tokens of a step's rows together, each with its row's own parameters and random numbers.

A row draws one random number per token. The probabilities of its candidates are added up, in the order of the
vocabulary or, if top_k or top_p needs it, the likeliest first; the first token whose sum exceeds the number is chosen.
Other rows do not change a row's choice (docs/decisions/0038-one-number-per-token.md).
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import TypicalLogitsWarper

from handlers.engine.contract import SamplingParams
from handlers.worker.device import upload
from torchmoor.wire.sampling_parameters import LOGIT_BIAS

MIN_TEMPERATURE = 1e-6  # below it logits overflow float32, and sampling is already greedy
BAN, ONLY = LOGIT_BIAS.least, LOGIT_BIAS.most  # biases that exclude a token, and all tokens without it
NUM_LIKELIEST = (256, 4096)  # tokens among which top_p looks before it sorts the whole vocabulary


class Cuts(NamedTuple):
    """Parameters that exclude tokens; None if they do not. Rows with equal cuts are sampled together."""

    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None


class Candidates(NamedTuple):
    """Tokens among which rows choose.

    rows: the rows' indexes. ids: (rows, tokens), the likeliest first; None for the whole vocabulary in its order.
    scores: (rows, tokens), logits divided by temperature. probabilities: (rows, tokens), before the next cut.
    """

    rows: list[int]
    ids: Tensor | None
    scores: Tensor
    probabilities: Tensor


class AnswerPenalties:
    """OpenAI's penalties on the logits of tokens in the answer: `frequency` per occurrence, `presence` once.

    answer: its tokens so far.
    """

    def __init__(self, frequency: float, presence: float, device: torch.device, answer: Sequence[int]) -> None:
        self._frequency, self._presence = frequency, presence
        self._device = device
        counts = Counter(answer)
        self._places = {token: place for place, token in enumerate(counts)}
        self._tokens = torch.tensor(list(counts), dtype=torch.int64, device=device)
        self._counts = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)

    def note(self, token: int) -> None:
        place = self._places.get(token)
        if place is not None:
            self._counts[place] += 1
            return
        self._places[token] = len(self._places)
        self._tokens = torch.cat((self._tokens, torch.tensor([token], device=self._device)))
        self._counts = torch.cat((self._counts, self._counts.new_ones(1)))

    def apply(self, logits: Tensor) -> None:
        """Change logits, (vocabulary,), in place."""
        logits[self._tokens] -= self._presence + self._frequency * self._counts


class LogitBias:
    """Adds a bias to the logits of some tokens. BAN excludes its tokens, ONLY excludes all others."""

    def __init__(self, bias: Sequence[tuple[int, float]], device: torch.device) -> None:
        tokens, amounts = zip(*bias, strict=True)
        self._tokens = torch.tensor(tokens, device=device)
        self._amounts = torch.tensor(amounts, dtype=torch.float32, device=device)
        banned, only = ([token for token, amount in bias if amount == limit] for limit in (BAN, ONLY))
        self._banned = torch.tensor(banned, dtype=torch.int64, device=device)
        self._only = torch.tensor(only, dtype=torch.int64, device=device)
        self.excludes = bool(banned or only)

    def apply(self, logits: Tensor) -> None:
        """Change logits, (vocabulary,), in place."""
        logits[self._tokens] += self._amounts

    def exclude(self, logits: Tensor) -> None:
        """Leave out tokens in place, unless no others are left. logits: (vocabulary,)."""
        left = logits.clone()
        if len(self._only):
            left.fill_(-torch.inf)
            left[self._only] = logits[self._only]
        left[self._banned] = -torch.inf
        logits.copy_(torch.where(left.isneginf().all(), logits, left))


class Sampler:
    """Holds a row's parameters, random state, penalized tokens, and grammar state.

    context: the row's token ids so far; negative ones, which identify images, are not penalized. answer: the ids of
    `context` that belong to its answer; raises GrammarFailed if the grammar does not allow them. eos_token_ids: they
    are not chosen before the answer has `min_tokens`.
    """

    def __init__(
        self,
        params: SamplingParams,
        context: Sequence[int],
        device: torch.device,
        answer: Sequence[int] = (),
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.random = random.Random(params.seed) if params.do_sample else None  # no seed: the system's entropy
        if self.random is not None:
            for _ in answer:  # skip the numbers of the given tokens
                self.random.random()
        self.temperature = max(params.temperature, MIN_TEMPERATURE)
        self.cuts = Cuts(
            params.top_k or None, _below_one(params.top_p), params.min_p or None, _below_one(params.typical_p)
        )
        self.penalty = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        if not self.penalty > 0:
            raise ValueError("repetition_penalty must be positive")
        self._answer_penalties: AnswerPenalties | None = None
        frequency, presence = params.frequency_penalty or 0.0, params.presence_penalty or 0.0
        if frequency or presence:
            self._answer_penalties = AnswerPenalties(frequency, presence, device, answer)
        self._bias = LogitBias(params.logit_bias, device) if params.logit_bias else None
        self._num_endless = max(0, (params.min_tokens or 0) - len(answer))  # next tokens, none of which may be an end
        end_ids = sorted(eos_token_ids) if self._num_endless else []
        self._end_ids = torch.tensor(end_ids, dtype=torch.int64, device=device)
        self.grammar = None if params.grammar is None else params.grammar.begin(answer)
        self.mask = b""  # of the allowed next tokens, from `prepare` to `note`, if there is a grammar
        self._number: float | None = None
        self._device = device
        self._said = {token for token in context if token >= 0} if self.penalty != 1.0 else set()
        self._said_ids = torch.tensor(sorted(self._said), dtype=torch.int64, device=device)

    @property
    def is_plain_greedy(self) -> bool:
        """True if the token is the largest logit, which the engine computes for all such rows at once."""
        return self.random is None and not self.weighs and self.grammar is None

    @property
    def weighs(self) -> bool:
        """True if the row changes its logits before a token is chosen."""
        has_penalties = self.penalty != 1.0 or self._answer_penalties is not None
        return has_penalties or self._bias is not None or self._num_endless > 0

    @property
    def excludes(self) -> bool:
        """True if a bias excludes tokens."""
        return self._bias is not None and self._bias.excludes

    @property
    def is_complete(self) -> bool:
        """True if the answer's grammar allows no further token."""
        return self.grammar is not None and self.grammar.is_complete

    def prepare(self) -> None:
        """Find the tokens that the grammar allows next. A repeated step reuses them. Raises GrammarFailed."""
        if self.grammar is not None and not self.mask:
            self.mask = self.grammar.mask()

    def draw(self) -> float:
        """Return the random number for the next token. Until `note` it stays the same, for repeated steps."""
        if self._number is None:
            assert self.random is not None
            self._number = self.random.random()
        return self._number

    def weigh(self, logits: Tensor) -> None:
        """Apply the row's penalties and bias, and exclude end tokens, in place. logits: (vocabulary,)."""
        if self.penalty != 1.0:
            own = logits[self._said_ids]
            logits[self._said_ids] = torch.where(own < 0, own * self.penalty, own / self.penalty)
        if self._answer_penalties is not None:
            self._answer_penalties.apply(logits)
        if self._bias is not None:
            self._bias.apply(logits)
        if self._num_endless:
            logits[self._end_ids] = -torch.inf

    def exclude(self, logits: Tensor) -> None:
        """Leave out, in place, the tokens that a bias excludes. logits: (vocabulary,)."""
        assert self._bias is not None
        self._bias.exclude(logits)

    def note(self, token: int) -> None:
        """Record the chosen token: for penalties, and for the grammar. The next token gets a new random number."""
        self._number, self.mask = None, b""
        self._num_endless = max(0, self._num_endless - 1)
        if self.grammar is not None:
            self.grammar.take(token)
        if self._answer_penalties is not None:
            self._answer_penalties.note(token)
        if self.penalty != 1.0 and token not in self._said:
            self._said.add(token)
            self._said_ids = torch.cat((self._said_ids, torch.tensor([token], device=self._device)))


def _below_one(mass: float | None) -> float | None:
    return mass if mass is not None and mass < 1.0 else None


def choose_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> tuple[list[int], list[float]]:
    """Return each row's next token, and its log probability among the candidates: not finite if the row failed.

    logits: (rows, vocabulary) float32, a row for each sampler. Samplers with a grammar must be prepared.
    """
    rows, drawn = draw_tokens(logits, samplers)
    tokens, logprobs = [0] * len(samplers), [0.0] * len(samplers)
    for row, values in zip(rows, drawn.tolist(), strict=True):
        tokens[row], logprobs[row] = note_token(samplers[row], values)
    return tokens, logprobs


@torch.inference_mode()
def draw_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> tuple[list[int], Tensor]:
    """Draw the tokens of `choose_tokens`. A repeated call draws the same ones. `note_token` must follow.

    Returns the rows in the order of the draws, and (rows, 2) float64 on the device: each row's token and its
    probability. Waits for the device only if top_p is the first cut.
    """
    groups: dict[tuple[Cuts | None, bool], list[int]] = defaultdict(list)
    for row, sampler in enumerate(samplers):
        groups[sampler.cuts if sampler.random is not None else None, sampler.grammar is not None].append(row)
    order: list[int] = []
    drawn: list[Tensor] = []
    for (cuts, has_grammar), rows in groups.items():
        own = [samplers[row] for row in rows]
        scores = _weighed(logits if len(groups) == 1 else logits[upload(torch.tensor(rows), logits.device)], own)
        if has_grammar:
            scores = _masked(scores, own)
        for row, sampler in enumerate(own):
            if sampler.excludes:
                sampler.exclude(scores[row])  # a copy, because such a row weighs
        parts = [(range(len(rows)), _take_largest(scores))] if cuts is None else _draw(scores, own, cuts)
        for places, chosen in parts:
            order += [rows[place] for place in places]
            drawn.append(chosen)
    return order, drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def note_token(sampler: Sampler, drawn: Sequence[float]) -> tuple[int, float]:
    """Record the token that was drawn for a row. Return it, and its log probability: not finite if the row failed.

    drawn: the row of the result of `draw_tokens`.
    """
    token, probability = int(drawn[0]), drawn[1]
    sampler.note(token)
    return token, math.log(probability) if probability > 0 else math.nan


def _weighed(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    weighing = [row for row, sampler in enumerate(samplers) if sampler.weighs]
    if weighing:
        logits = logits.clone()
    for row in weighing:
        samplers[row].weigh(logits[row])
    return logits


def _masked(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Return the logits with -inf for each token that the rows' grammars do not allow."""
    masks = torch.frombuffer(bytearray(b"".join(sampler.mask for sampler in samplers)), dtype=torch.uint8)
    masks = upload(masks.view(len(samplers), -1), logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_left_out = ((masks[:, :, None] >> bits) & 1 == 0).view(len(samplers), -1)
    return logits.masked_fill(is_left_out[:, : logits.shape[-1]], -torch.inf)


def _take_largest(logits: Tensor) -> Tensor:
    """Return (rows, 2): the token of each row's largest logit, and its probability."""
    tokens = logits.argmax(dim=-1, keepdim=True)
    return torch.cat((tokens.double(), logits.softmax(dim=-1).gather(1, tokens)), dim=-1)


def _draw(logits: Tensor, samplers: Sequence[Sampler], cuts: Cuts) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield parts of the rows: their indexes, and (rows, 2): the drawn tokens and their probabilities."""
    device = logits.device
    own = torch.tensor([(sampler.draw(), sampler.temperature) for sampler in samplers], dtype=torch.float64)
    own = upload(own, device)
    numbers, temperatures = own[:, :1], own[:, 1:].float()
    ids = None
    if cuts.top_k is not None and cuts.top_k < logits.shape[-1]:
        logits, ids = logits.topk(cuts.top_k)  # in order, as top_p needs them
    scores = logits / temperatures
    candidates = Candidates(list(range(len(samplers))), ids, scores, scores.softmax(dim=-1))
    parts = _find_likeliest(candidates, cuts.top_p) if cuts.top_p is not None and ids is None else [candidates]
    for part in parts:
        probabilities = _cut(part, cuts)
        sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
        wholes = sums[:, -1:]
        part_numbers = numbers if len(part.rows) == len(numbers) else numbers[part.rows]
        bounds = torch.minimum(part_numbers * wholes, wholes.nextafter(wholes.new_zeros(1)))
        places = torch.searchsorted(sums, bounds, right=True).clamp_(max=sums.shape[-1] - 1)
        tokens = places if part.ids is None else part.ids.gather(1, places)
        yield part.rows, torch.cat((tokens.double(), probabilities.gather(1, places) / wholes), dim=-1)


def _find_likeliest(whole: Candidates, mass: float) -> Iterator[Candidates]:
    """Yield parts of the rows with their likeliest tokens in order, whose probabilities have at least this sum."""
    rows, size = whole.rows, whole.scores.shape[-1]
    for number in (*(n for n in NUM_LIKELIEST if n < size), size):
        probabilities, ids = whole.probabilities[rows].topk(number)
        is_enough = (probabilities.sum(dim=-1) >= mass).tolist() if number < size else [True] * len(rows)
        done = [place for place, is_done in enumerate(is_enough) if is_done]
        if done:
            ids, own = ids[done], [rows[place] for place in done]
            yield Candidates(own, ids, whole.scores[own].gather(1, ids), probabilities[done])
        rows = [row for row, is_done in zip(rows, is_enough, strict=True) if not is_done]
        if not rows:
            return


def _cut(candidates: Candidates, cuts: Cuts) -> Tensor:
    """Return the candidates' probabilities, 0 if top_p, min_p or typical_p excludes them. They need not add up to 1."""
    probabilities = candidates.probabilities
    if cuts.top_p is not None:
        before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
        probabilities = probabilities.masked_fill(before >= cuts.top_p, 0.0)
    if cuts.min_p is not None:
        least = cuts.min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    if cuts.typical_p is not None:
        scores = candidates.scores.masked_fill(probabilities == 0, -torch.inf)
        typical = TypicalLogitsWarper(cuts.typical_p)
        # Row by row: with several threads, torch adds up one row in another order than several rows.
        warped = [typical(None, row[None]) for row in scores]  # type: ignore[arg-type]  # reads no token ids
        probabilities = torch.cat(warped).softmax(dim=-1)
    return probabilities
