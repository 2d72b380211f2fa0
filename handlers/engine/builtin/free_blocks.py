"""The free blocks of the pool, kept as gaps so that a sequence's blocks are adjacent where possible.

A sequence whose blocks are adjacent is read in place; scattered blocks must be gathered at each step.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator


class FreeBlocks:
    """Not thread-safe: the pool's lock guards it."""

    def __init__(self, num_blocks: int) -> None:
        self._gaps: list[tuple[int, int]] = [(0, num_blocks)] if num_blocks else []  # [start, end), sorted, apart
        self._num_free = num_blocks

    def __len__(self) -> int:
        return self._num_free

    def __iter__(self) -> Iterator[int]:
        return (block for start, end in self._gaps for block in range(start, end))

    def __repr__(self) -> str:
        return f"<FreeBlocks {self._num_free} in {len(self._gaps)} gaps>"

    def take(self, num_blocks: int, after: int | None = None) -> list[int]:
        """Return blocks for a sequence whose last block is `after`: the next ones if free, else from the widest gaps.

        A new run begins in the middle of a wide gap, so that the sequence before the gap can still grow into it.
        """
        assert num_blocks <= self._num_free
        taken: list[int] = []
        if after is not None:
            i = bisect_left(self._gaps, (after + 1, 0))
            if i < len(self._gaps) and self._gaps[i][0] == after + 1:
                taken += self._cut(i, after + 1, num_blocks)
        while len(taken) < num_blocks:
            missing = num_blocks - len(taken)
            start, end = max(self._gaps, key=lambda gap: gap[1] - gap[0])
            width = end - start
            is_between = start > 0 and width >= 2 * missing
            taken += self._cut(self._gaps.index((start, end)), start + width // 2 if is_between else start, missing)
        return taken

    def _cut(self, index: int, first: int, num_blocks: int) -> list[int]:
        """Remove up to `num_blocks` blocks, from `first` on, from the gap of this index, and return them."""
        start, end = self._gaps.pop(index)
        last = min(first + num_blocks, end)
        rest = [gap for gap in ((start, first), (last, end)) if gap[0] < gap[1]]
        self._gaps[index:index] = rest
        self._num_free -= last - first
        return list(range(first, last))

    def give(self, block: int) -> None:
        """Take a block back."""
        start, end = block, block + 1
        i = bisect_left(self._gaps, (block, 0))
        if i < len(self._gaps) and self._gaps[i][0] == end:
            end = self._gaps.pop(i)[1]
        if i > 0 and self._gaps[i - 1][1] == start:
            start = self._gaps.pop(i - 1)[0]
        insort(self._gaps, (start, end))
        self._num_free += 1
