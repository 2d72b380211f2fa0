"""Chooses the sequences of the next step and their numbers of tokens. Decides only; runs without a model.

Every decoding sequence gets one token in each step. The pace limits the prompt tokens beside them, so that a long
prompt never delays the streams. Sequences join in order of arrival, when there is a row and KV cache for the whole
answer, so that no running sequence can run out of it.
"""

from collections import deque
from dataclasses import dataclass

from handlers.engine.builtin.pace import Pace
from handlers.engine.builtin.sequence import TokenSequence
from handlers.errors import OutOfMemory


@dataclass(frozen=True, slots=True)
class StepShare:
    """A sequence's share of a step: its next `tokens`. is_last: the step produces a new token."""

    sequence: TokenSequence
    tokens: list[int]
    is_last: bool


class Scheduler:
    def __init__(self, max_rows: int, pace: Pace) -> None:
        self.max_rows = max_rows
        self.pace = pace
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []
        self._count = 0  # of arrivals and batches, to tell what came first

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.running)} running, {len(self.waiting)} waiting>"

    def add(self, sequence: TokenSequence) -> None:
        self._count += 1
        sequence.arrived = self._count
        self.waiting.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove an ended sequence from the running or the waiting ones."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def all(self) -> list[TokenSequence]:
        return [*self.running, *self.waiting]

    def admit(self) -> TokenSequence | None:
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
        """Return the next step's shares, decoding sequences first; empty if there is nothing to do.

        Within the decoding shares, and within the others, shares of one adapter are adjacent.
        """
        self._count += 1
        decoding = [StepShare(s, s.pending(1), True) for s in self.running if not s.is_prefilling]
        for each in decoding:
            each.sequence.began = each.sequence.began or self._count
        prefilling = []
        for sequence, share in self._share([each.sequence for each in decoding]):
            tokens = sequence.pending(share)
            prefilling.append(StepShare(sequence, tokens, len(tokens) == sequence.num_pending))
        if any(sequence.adapter is not None for sequence in self.running):
            decoding.sort(key=_adapter_of)
            prefilling.sort(key=_adapter_of)
        return decoding + prefilling

    def _share(self, decoding: list[TokenSequence]) -> list[tuple[TokenSequence, int]]:
        """Return the number of prompt tokens of each prefilling sequence; none is 0.

        The pace protects running answers from later prompts. Prompts that arrived before any decoding sequence had
        begun belong to the same burst: they are computed first, without the pace's limit, because splitting the burst
        would delay all of it more. Of a step's prompt tokens the oldest prompt gets half, so that none starves; the
        others share the rest, the shortest first, so that a short question does not wait for a long document.
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


def _adapter_of(share: StepShare) -> int:
    return id(share.sequence.adapter)
