"""Serves chat with a table instead of a model, so that stream.py measures the cost of everything else.

All other parts are the product's: sessions, scheduler, KV cache, sampler, detokenizer, pump.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from handlers.chat_entry import ChatHandler
from handlers.engine.builtin.runner import ModelRunner, StepResult
from handlers.engine.builtin.scheduler import StepShare

TABLE = [50 + (17 * number) % 400 for number in range(400)]  # the token ids of an answer, in order
LOGITS = torch.nn.functional.one_hot(torch.tensor(TABLE), 480).float() * 10
LOGPROBS = LOGITS.log_softmax(dim=-1).amax(dim=-1).tolist()


def run_for_free(
    runner: ModelRunner, batch: Sequence[StepShare], draw: Callable[[Tensor], Tensor | None]
) -> StepResult:
    """Return the table's next row for each share of the batch."""
    rows = [len(share.sequence.output) % len(TABLE) for share in batch]
    for share in batch:
        share.sequence.cache.advance(share.tokens)
    logits = LOGITS[rows]
    drawn = draw(logits)
    greedy, logprobs = [TABLE[row] for row in rows], [LOGPROBS[row] for row in rows]
    return StepResult(logits, greedy, logprobs, [] if drawn is None else drawn.tolist())


class FreeEngineHandler:
    """The chat handler with a table instead of a model."""

    def initialize(self, context: Any) -> None:
        ModelRunner.run = run_for_free
        self._chat = ChatHandler()
        self._chat.initialize(context)

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[bytes]:
        return self._chat.handle(rows, context)
