"""Counts of vLLM's steps, for the worker's status."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

from handlers.engine.contract import EngineNumbers
from handlers.engine.vllm.pool import VllmPool


class StepLog(PrometheusStatLogger):
    """vLLM calls `record` on the loop's thread after each step.

    It replaces vLLM's own Prometheus metrics, which take time in each step and are not shown on any page.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        cache = vllm_config.cache_config
        self.pool = VllmPool((cache.num_gpu_blocks or 0) * cache.block_size, _token_bytes(vllm_config))
        self._steps = self._rows = self._queued = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self._steps += 1
        if scheduler_stats is not None:
            self._rows = scheduler_stats.num_running_reqs
            self._queued = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.pool.used_bytes = int(scheduler_stats.kv_cache_usage * self.pool.capacity_bytes)

    def log_engine_initialized(self) -> None: ...

    def record_admission_rejection(self, reason: str) -> None: ...

    def numbers(self) -> EngineNumbers:
        return EngineNumbers(self._steps, self._rows, self._queued)


def _token_bytes(config: VllmConfig) -> int:
    """Return the bytes of a position's keys and values on all devices together."""
    model = config.model_config
    num_layers = model.hf_text_config.num_hidden_layers
    kind = model.dtype.itemsize if config.cache_config.cache_dtype == "auto" else 1
    return int(2 * num_layers * model.get_total_num_kv_heads() * model.get_head_size() * kind)
