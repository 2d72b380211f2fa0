"""A step's draw: launched for all sampled rows together, and finished row by row."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from handlers.engine.builtin.draw import Draw
from handlers.engine.builtin.runner import StepResult
from handlers.engine.builtin.sampler import Sampler, choose_tokens
from handlers.engine.contract import SamplingParams
from handlers.engine.grammar import GrammarFailed

CPU = torch.device("cpu")
LOGITS = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3


def new_sampler(seed: int, **params: Any) -> Sampler:
    return Sampler(SamplingParams(max_new_tokens=1, do_sample=True, seed=seed, **params), (1, 2), CPU)


def run(draw: Draw) -> StepResult:
    """Run a step with these logits, and return its results as the runner reads them."""
    drawn = draw.begin(LOGITS)
    return StepResult(LOGITS, [0] * 4, [0.0] * 4, [] if drawn is None else drawn.tolist())


def alone(sampler: Sampler, row: int) -> tuple[int, float]:
    [token], [logprob] = choose_tokens(LOGITS[[row]], [sampler])
    return token, logprob


def test_each_row_has_the_token_that_it_draws_alone() -> None:
    """Rows drawn together, with equal and with other parameters, get the same tokens as alone; row 2 is not sampled."""
    kinds: dict[int, dict[str, Any]] = {0: {"top_k": 5}, 1: {"top_p": 0.5}, 3: {"top_k": 5}}
    draw = Draw({row: new_sampler(row, **params) for row, params in kinds.items()})
    result = run(draw)

    assert len(result.drawn) == 3
    for row, params in kinds.items():
        assert draw.finish(row, result) == alone(new_sampler(row, **params), row)


def test_a_step_without_sampled_rows_draws_nothing() -> None:
    """A step without sampled rows leaves nothing for the runner to read."""
    assert Draw({}).begin(LOGITS) is None


def test_a_repeated_step_draws_the_same() -> None:
    """The random state advances only when a token is taken, so a step that failed can run again."""
    sampler = new_sampler(7)
    first = run(Draw({0: sampler}))
    draw = Draw({0: sampler})
    result = run(draw)

    assert result.drawn == first.drawn
    draw.finish(0, result)
    assert run(Draw({0: sampler})).drawn != first.drawn


def test_a_row_that_cannot_be_drawn_fails_alone() -> None:
    """A row that cannot be drawn gets its error; the others get the tokens that they draw alone."""
    samplers = {0: new_sampler(0), 1: new_sampler(1, repetition_penalty=2.0)}
    draw = Draw(samplers)

    def fail(logits: Tensor) -> None:
        raise RuntimeError("no penalty today")

    with patch.object(samplers[1], "weigh", fail):
        result = run(draw)
        assert result.drawn == []
        assert draw.finish(0, result) == alone(new_sampler(0), 0)
        with pytest.raises(RuntimeError, match="no penalty today"):
            draw.finish(1, result)


def test_a_grammar_that_fails_ends_its_row_only() -> None:
    """The row of a failed grammar is not drawn, and `finish` raises its error."""
    samplers = {0: new_sampler(0), 1: new_sampler(1)}

    def fail() -> None:
        raise GrammarFailed("too many states")

    with patch.object(samplers[1], "prepare", fail):
        draw = Draw(samplers)
        result = run(draw)

    assert len(result.drawn) == 1
    assert math.isfinite(draw.finish(0, result)[1])
    with pytest.raises(GrammarFailed, match="too many states"):
        draw.finish(1, result)
