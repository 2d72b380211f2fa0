"""Steps of a fixed number of rows, one token each, which a GPU replays as CUDA graphs: one launch instead of 1,500.

There is a graph for 1, 2, 4, ... rows, captured at the load. A step runs the smallest one that has room; rows without a
token write to the pool's spare block. The graphs stay valid as contexts grow, since attention reads each row's length
and blocks from the device's memory.

A short prompt takes a row per token: all of them store their keys and values before any of them attends, and each one
sees only the positions up to its own. Each row reads its context itself, so with long contexts it is faster to launch
the kernels one by one and to read the context once. The load measures both.
"""

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from handlers.engine.builtin.kv_cache import BLOCK, BlockPool, SequenceCache, num_blocks
from handlers.errors import OutOfMemory
from handlers.models.attention import DecodingRows, PackedBatch
from handlers.models.text import TextModel
from handlers.worker.device import capture_lock, upload

logger = logging.getLogger(__name__)
MEASURED_BLOCKS = 64  # of the context with which rows are measured
USED_GAIN = 0.8  # of the time that a graph saves, which the rows' reading may take: the measurement is short
NUM_WARM_UPS = 2  # runs before a capture: libraries allocate and Triton compiles at their first calls


class BlockTable:
    """(max_rows, max blocks) int32 on the device: the blocks of each row. Only changed rows are written."""

    def __init__(self, pool: BlockPool, max_rows: int, max_blocks: int) -> None:
        self._spare = torch.tensor([pool.capacity], dtype=torch.int32, device=pool.shape.device)
        self._rows = self._spare.repeat(max_rows, max(1, min(max_blocks, pool.capacity)))
        self._held: list[Tensor] = [self._spare] * max_rows

    def __getitem__(self, rows: slice) -> Tensor:
        return self._rows[rows]

    @property
    def max_blocks(self) -> int:
        return self._rows.shape[1]

    def set_all(self, blocks: Tensor) -> None:
        """Give every row these blocks, or one. The next `set` writes all rows."""
        self._rows[:, : len(blocks)] = blocks
        self._held = [blocks] * len(self._held)

    def set(self, caches: Sequence[SequenceCache], num_rows: int) -> Tensor:
        """Write each cache's blocks into its row. Return `num_rows` rows; the rest of them have the spare block."""
        for row in range(num_rows):
            blocks = caches[row].blocks if row < len(caches) else self._spare
            if self._held[row] is not blocks:
                self._rows[row, : len(blocks)] = blocks
                self._held[row] = blocks
        return self._rows[:num_rows]


class RowSteps:
    """Steps of at most `max_rows` tokens. All calls on one thread.

    has_graphs: on a GPU, capture the steps as CUDA graphs; else their kernels are launched one by one. has_prompts:
    take every prompt that has room. None: take prompts only with graphs, and only where that is faster. table: also for
    other steps with rows of one token.
    """

    def __init__(
        self,
        model: TextModel,
        pool: BlockPool,
        max_rows: int,
        *,
        has_graphs: bool,
        has_prompts: bool | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self.table = BlockTable(pool, max_rows, num_blocks(model.max_context))
        device = pool.shape.device
        self._host = torch.zeros((max_rows, 2), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs = torch.zeros((max_rows, 2), dtype=torch.int64, device=device)  # each row's token and position
        self._sizes = batch_sizes(max_rows)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._max_positions = math.inf if has_prompts else 0.0  # that the tokens of prompts may see in all
        if has_graphs and device.type == "cuda":
            with capture_lock:
                self._graphs = self._capture_all()
                if self._graphs and has_prompts is None:
                    self._max_positions = self._measure()

    def takes(self, shares: Sequence[tuple[Sequence[int], SequenceCache]]) -> bool:
        """Return True if the step can run here, and is not slower than with all kernels launched one by one.

        shares: as in `run`. A step with an image's tokens, which are negative, is refused.
        """
        if sum(len(tokens) for tokens, _ in shares) > self._sizes[-1]:
            return False
        if any(token < 0 for tokens, _ in shares for token in tokens):
            return False
        prompts = [(len(tokens), cache.length) for tokens, cache in shares if len(tokens) > 1]
        return sum(number * (start + number) for number, start in prompts) <= self._max_positions

    def run(self, shares: Sequence[tuple[Sequence[int], SequenceCache]]) -> Tensor:
        """Return (shares, vocabulary) float32: the logits after each share's last token. All tokens are stored.

        shares: the next tokens of a sequence, and its cache. The tensor stays valid until the next step.
        """
        rows = [(token, place, cache) for tokens, cache in shares for place, token in enumerate(tokens, cache.length)]
        num_rows = len(rows)
        size = min(size for size in self._sizes if size >= num_rows)
        self.table.set([cache for _, _, cache in rows], size)
        inputs = self._host[:size]
        inputs[:num_rows] = torch.tensor([(token, place) for token, place, _ in rows])
        inputs[num_rows:] = 0  # rows without a token have token 0 at position 0 of the spare block
        self._inputs[:size].copy_(inputs, non_blocking=True)
        if size in self._graphs:
            graph, logits = self._graphs[size]
            graph.replay()
        else:
            logits = self._forward(size)
        if num_rows == len(shares):
            return logits[:num_rows]
        ends = torch.tensor([end - 1 for end in accumulate(len(tokens) for tokens, _ in shares)])
        return logits[upload(ends, logits.device)]

    def _capture_all(self) -> dict[int, tuple[torch.cuda.CUDAGraph, Tensor]]:
        memory, before = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # one stream for all graphs, because cuBLAS keeps a workspace per stream
        gc.collect()  # a graph that is freed during a capture would break it
        try:
            # The largest first: the others fit into its memory.
            graphs = {num_rows: self._capture(num_rows, memory, stream) for num_rows in reversed(self._sizes)}
        except torch.OutOfMemoryError as exc:
            raise OutOfMemory("the device has no room for the engine's CUDA graphs") from exc
        except RuntimeError as exc:  # a model that waits for the device, such as a mixture of experts
            torch.cuda.set_stream(before)
            torch.cuda.synchronize()
            logger.warning("steps run without CUDA graphs, which is slower error=%s", str(exc).partition("\n")[0])
            return {}
        logger.info("steps captured rows=%s", self._sizes)
        return graphs

    def _measure(self) -> float:
        """Return how many positions the tokens of prompts may see in all before rows take longer than launches.

        Writes to blocks, so the pool must be empty.
        """
        size = self._sizes[-1]
        graph, _ = self._graphs[size]
        blocks = torch.arange(min(MEASURED_BLOCKS, self.table.max_blocks), dtype=torch.int32)
        self._inputs.zero_()
        launched_s, short_s = _time(lambda: self._forward(size)), _time(graph.replay)
        self.table.set_all(blocks.to(self._inputs.device))
        self._inputs[:, 1] = len(blocks) * BLOCK - 1
        long_s = _time(graph.replay)
        self.table.set([], size)
        position_s = max(long_s - short_s, 1e-6) / (size * len(blocks) * BLOCK)
        found = USED_GAIN * max(0.0, launched_s - short_s) / position_s
        logger.info(
            "steps measured rows=%d launched_s=%.4f graph_s=%.4f with_context_s=%.4f prompt_positions=%d",
            size, launched_s, short_s, long_s, found,
        )  # fmt: skip
        return found

    def _capture(self, num_rows: int, memory: Any, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                self._forward(num_rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            logits = self._forward(num_rows)
        return graph, logits

    @torch.inference_mode()
    def _forward(self, num_rows: int) -> Tensor:
        ids, positions = self._inputs[:num_rows, 0], self._inputs[:num_rows, 1]
        table = self.table[:num_rows]
        blocks = table.gather(1, (positions // BLOCK)[:, None])[:, 0]
        slots = blocks.long() * BLOCK + positions % BLOCK
        batch = PackedBatch(self._pool.storage, slots, (), DecodingRows(table, (positions + 1).int(), BLOCK))
        last = torch.arange(num_rows, device=ids.device)
        return self._model.forward(self._model.embed(ids), positions, batch, last)


def _time(action: Callable[[], object]) -> float:
    """Return the seconds that the device takes for an action: the shorter of two measurements."""
    times = []
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def batch_sizes(max_rows: int) -> list[int]:
    """Return 1, 2, 4, ... up to max_rows, which is the last."""
    sizes = [1]
    while sizes[-1] < max_rows:
        sizes.append(min(2 * sizes[-1], max_rows))
    return sizes
