"""Draws the tokens of a step's sampled rows while the device still computes the step.

A GPU computes a step long after its kernels were launched. So the kernels of the sampler are launched behind them, and
the engine waits once for both.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from handlers.engine.builtin.runner import StepResult
from handlers.engine.builtin.sampler import Sampler, choose_tokens, draw_tokens, note_token
from handlers.engine.grammar import GrammarFailed
from handlers.worker.device import upload

logger = logging.getLogger(__name__)


class Draw:
    """The draw of one step.

    samplers: of the sampled rows, by the row's index in the batch.
    """

    def __init__(self, samplers: Mapping[int, Sampler]) -> None:
        self._samplers = samplers
        self._failed: dict[int, GrammarFailed] = {}
        self._places: dict[int, int] = {}  # of the rows in `StepResult.drawn`

    def begin(self, logits: Tensor) -> Tensor | None:
        """Launch the draw, and return what `finish` needs of it. logits: the whole batch's."""
        rows = [row for row, sampler in self._samplers.items() if self._prepare(row, sampler)]
        if not rows:
            return None
        try:
            own = logits if len(rows) == len(logits) else logits[upload(torch.tensor(rows), logits.device)]
            order, drawn = draw_tokens(own, [self._samplers[row] for row in rows])
        except Exception as exc:  # `finish` draws for each row alone, so that only the cause fails
            logger.warning("sampling failed and is repeated row by row rows=%d error=%s", len(rows), exc)
            return None
        self._places = {rows[index]: place for place, index in enumerate(order)}
        return drawn

    def _prepare(self, row: int, sampler: Sampler) -> bool:
        """Ask the row's grammar which tokens may come next; return False if it fails."""
        try:
            sampler.prepare()
        except GrammarFailed as exc:
            self._failed[row] = exc
            return False
        return True

    def finish(self, row: int, result: StepResult) -> tuple[int, float]:
        """Return a row's token, and its log probability: not finite if the row failed. Call once per row.

        Raises GrammarFailed, and whatever fails for this row alone.
        """
        if row in self._failed:
            raise self._failed[row]
        sampler = self._samplers[row]
        if row in self._places:
            return note_token(sampler, result.drawn[self._places[row]])
        [token], [logprob] = choose_tokens(result.logits[[row]], [sampler])
        return token, logprob
