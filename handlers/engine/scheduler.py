"""Which sequences get how many tokens in the next step. Decides only; runs without a model.

Every decoding sequence gets its one token in each step; what the prefill budget leaves goes to prompts, oldest
first, in chunks, so that a long prompt never holds up the streams.
"""

from collections import deque
from dataclasses import dataclass

from handlers.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's share of a step: its next `tokens`; `is_last` when a new token comes out of them."""

    sequence: Sequence
    tokens: list[int]
    is_last: bool


class Scheduler:
    def __init__(self, max_rows: int, prefill_chunk: int) -> None:
        self.max_rows = max_rows
        self.prefill_chunk = prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.running)} running, {len(self.waiting)} waiting>"

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def all(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def next_batch(self) -> list[Work]:
        """The next step's work, empty when there is nothing to do."""
        while self.waiting and len(self.running) < self.max_rows:
            self.running.append(self.waiting.popleft())
        decoding = [Work(s, s.pending(1), True) for s in self.running if not s.is_prefilling]
        prefilling = []
        budget = self.prefill_chunk
        for sequence in self.running:
            if sequence.is_prefilling and budget > 0:
                tokens = sequence.pending(budget)
                budget -= len(tokens)
                prefilling.append(Work(sequence, tokens, len(tokens) == sequence.num_pending))
        return decoding + prefilling
