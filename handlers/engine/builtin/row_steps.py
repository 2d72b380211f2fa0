"""Decoding steps of a fixed number of rows, which a GPU replays as CUDA graphs: one launch instead of fifty per layer.

There is a graph for 1, 2, 4, ... rows, captured at the load. A step runs the smallest one that has room; rows without a
sequence write to the pool's spare block. The graphs stay valid as contexts grow, since attention reads each row's
length and blocks from the device's memory.
"""

import gc
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from handlers.engine.builtin.kv_cache import BLOCK, BlockPool, SequenceCache
from handlers.errors import OutOfMemory
from handlers.models.attention import DecodingRows, PackedBatch
from handlers.models.text import TextModel

logger = logging.getLogger(__name__)
NUM_WARM_UPS = 2  # runs before a capture: libraries allocate and Triton compiles at their first calls


class BlockTable:
    """(max_rows, max blocks) int32 on the device: the blocks of each row. Only changed rows are written."""

    def __init__(self, pool: BlockPool, max_rows: int, max_blocks: int) -> None:
        self._spare = torch.tensor([pool.capacity], dtype=torch.int32, device=pool.shape.device)
        self._rows = self._spare.repeat(max_rows, max(1, min(max_blocks, pool.capacity)))
        self._held: list[Tensor] = [self._spare] * max_rows

    def __getitem__(self, rows: slice) -> Tensor:
        return self._rows[rows]

    def set(self, caches: Sequence[SequenceCache], num_rows: int) -> Tensor:
        """Write the caches' blocks. Return `num_rows` rows; rows beyond the caches have the spare block."""
        for row in range(num_rows):
            blocks = caches[row].blocks if row < len(caches) else self._spare
            if self._held[row] is not blocks:
                self._rows[row, : len(blocks)] = blocks
                self._held[row] = blocks
        return self._rows[:num_rows]


class DecodeSteps:
    """Steps in which each row gets one token. All calls on one thread.

    has_graphs: on a GPU, capture the steps as CUDA graphs; else their kernels are launched one by one.
    """

    def __init__(
        self, model: TextModel, pool: BlockPool, table: BlockTable, max_rows: int, *, has_graphs: bool
    ) -> None:
        self._model = model
        self._pool = pool
        self._table = table
        device = pool.shape.device
        self._host = torch.zeros((max_rows, 2), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs = torch.zeros((max_rows, 2), dtype=torch.int64, device=device)  # each row's token and position
        self._sizes = batch_sizes(max_rows)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        if has_graphs and device.type == "cuda":
            self._graphs = self._capture_all()

    def run(self, tokens: Sequence[int], caches: Sequence[SequenceCache]) -> Tensor:
        """Return (rows, vocabulary) float32: the logits after each row's next token, which is stored.

        The tensor stays valid until the next step.
        """
        num_rows = len(tokens)
        size = min(size for size in self._sizes if size >= num_rows)
        self._table.set(caches, size)
        inputs = self._host[:size]
        inputs[:num_rows] = torch.tensor([(t, cache.length) for t, cache in zip(tokens, caches, strict=True)])
        inputs[num_rows:] = 0  # rows without a sequence have token 0 at position 0 of the spare block
        self._inputs[:size].copy_(inputs, non_blocking=True)
        if size not in self._graphs:
            return self._forward(size)[:num_rows]
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:num_rows]

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
            logger.warning("decoding runs without CUDA graphs, which is slower error=%s", str(exc).partition("\n")[0])
            return {}
        logger.info("decoding steps captured rows=%s", self._sizes)
        return graphs

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
        table = self._table[:num_rows]
        blocks = table.gather(1, (positions // BLOCK)[:, None])[:, 0]
        slots = blocks.long() * BLOCK + positions % BLOCK
        batch = PackedBatch(self._pool.storage, slots, (), DecodingRows(table, (positions + 1).int(), BLOCK))
        last = torch.arange(num_rows, device=ids.device)
        return self._model.forward(self._model.embed(ids), positions, batch, last)


def batch_sizes(max_rows: int) -> list[int]:
    """Return 1, 2, 4, ... up to max_rows, which is the last."""
    sizes = [1]
    while sizes[-1] < max_rows:
        sizes.append(min(2 * sizes[-1], max_rows))
    return sizes
