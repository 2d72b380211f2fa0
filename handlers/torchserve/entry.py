"""What the entry files have in common: logs, the start of a worker, its metrics and its steps."""

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchmoor.wire.imports import without_collections

if TYPE_CHECKING:  # imported later: TorchServe hides an ImportError of the entry file
    from handlers.torchserve.pump import Pump
    from handlers.worker.counters import Metric


class StartedWorker(NamedTuple):
    """A worker's running parts. metrics: what counts, with the table of its metrics."""

    service: Any
    pump: "Pump"
    metrics: Sequence[tuple[Any, Sequence["Metric"]]]


class WorkerEntry(ABC):
    """A worker as TorchServe runs it, which calls `initialize` once, then `handle` in every step."""

    @abstractmethod
    def import_start(self) -> Callable[..., StartedWorker]:
        """Import the worker's modules; return the function that starts it, as `start_chat` does."""

    def initialize(self, context: Any) -> None:
        """Start the service on the device that TorchServe assigned to this worker.

        Raises RuntimeError if a setting is invalid or the checkpoint cannot be loaded.
        """
        logging.getLogger().setLevel(logging.WARNING)  # writing INFO lines takes longer than an engine step
        logging.getLogger("handlers").setLevel(os.environ.get("TORCHMOOR_LOG_LEVEL", "INFO"))
        with without_collections():
            from handlers.torchserve.batch_reader import BatchReader
            from handlers.torchserve.metrics_publisher import publish_metrics

            start = self.import_start()
        started = time.monotonic()
        BatchReader().install()
        worker = start(
            Path(context.system_properties["model_dir"]),
            context.system_properties.get("gpu_id"),
            context.model_yaml_config or {},
            os.environ,
        )
        self.service, self.pump = worker.service, worker.pump
        self.publishers = [publish_metrics(context, service, table) for service, table in worker.metrics]
        logging.getLogger("handlers").info("handler ready seconds=%.1f", time.monotonic() - started)

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[bytes]:
        """Run one step: return a body for each row, empty for rows without an answer yet. Never raises."""
        bodies: list[bytes] = self.pump.handle(rows, context)
        return bodies
