"""Chooses the sequences of the next step and their numbers of tokens. Decides only; runs without a model.

Every decoding sequence gets its one token in each step; what the pace leaves goes to prompts, in chunks, so that a long
prompt never holds up the streams. A sequence joins, in order of arrival, when there is a row for it and
room for its whole answer in the KV cache, so that none that runs can ever run out of it.
"""

from collections import deque
from dataclasses import dataclass

from handlers.engine.builtin.pace import Pace
from handlers.engine.builtin.sequence import Sequence
from handlers.errors import OutOfMemory


@dataclass(frozen=True, slots=True)
class StepShare:
    """A sequence's share of a step: its next `tokens`; `is_last` when a new token comes out of them."""

    sequence: Sequence
    tokens: list[int]
    is_last: bool


class Scheduler:
    def __init__(self, max_rows: int, pace: Pace) -> None:
        self.max_rows = max_rows
        self.pace = pace
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._count = 0  # of arrivals and batches, to tell what came first

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.running)} running, {len(self.waiting)} waiting>"

    def add(self, sequence: Sequence) -> None:
        self._count += 1
        sequence.arrived = self._count
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def all(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def admit(self) -> Sequence | None:
        """Admit waiting sequences while the cache has room.

        If the oldest cannot join and no sequence runs, returns the newest one: the caller must free its blocks and
        call `admit` again.
        """
        while self.waiting and len(self.running) < self.max_rows:
            oldest = self.waiting[0]
            try:
                oldest.cache.reserve(oldest.max_tokens)
            except OutOfMemory:
                return None if self.running else self.waiting[-1]
            self.running.append(self.waiting.popleft())
        return None

    def next_batch(self) -> list[StepShare]:
        """Return the next step's shares, none when there is nothing to do; decoding sequences come first."""
        self._count += 1
        decoding = [StepShare(s, s.pending(1), True) for s in self.running if not s.is_prefilling]
        for each in decoding:
            each.sequence.began = each.sequence.began or self._count
        prefilling = []
        for sequence, share in self._share([each.sequence for each in decoding]):
            tokens = sequence.pending(share)
            prefilling.append(StepShare(sequence, tokens, len(tokens) == sequence.num_pending))
        return decoding + prefilling

    def _share(self, decoding: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Return the number of prompt tokens of each prefilling sequence; none is 0.

        The pace protects answers from prompts that come later. Prompts that were there before any of those that decode
        had begun are one burst with them: they go first and at once, since steps of half the burst would cost each of
        them more than a pause does. Of a step's prompt tokens the oldest prompt gets half, so that none starves, the
        others the rest, the shortest first: a short question does not wait until a long document has been read.
        """
        prompts = [sequence for sequence in self.running if sequence.is_prefilling]
        early = [p for p in prompts if all(p.arrived < sequence.began for sequence in decoding)]
        budget = self.pace.max_chunk if early else self.pace.chunk(len(decoding))
        prompts = early or prompts
        if not prompts:
            return []
        oldest, *others = prompts
        for_others = min(budget // 2, sum(sequence.num_pending for sequence in others))
        shares = [(oldest, min(oldest.num_pending, budget - for_others))]
        left = budget - shares[0][1]
        for sequence in sorted(others, key=lambda sequence: sequence.num_pending):
            if left == 0:
                break
            shares.append((sequence, min(sequence.num_pending, left)))
            left -= shares[-1][1]
        return shares
