"""The entry file of the archive of many models. TorchServe expects exactly one class in it."""

import logging
import os
import time
from pathlib import Path
from typing import Any


class ManyHandler:
    """Serves many models. TorchServe calls `initialize` once, then `handle` for every step."""

    def initialize(self, context: Any) -> None:
        """Start the service on the device that TorchServe assigned.

        Raises RuntimeError for a wrong setting.
        """
        logging.getLogger().setLevel(logging.WARNING)  # TorchServe's INFO lines cost more than a step
        logging.getLogger("handlers").setLevel(os.environ.get("TORCHMOOR_LOG_LEVEL", "INFO"))
        from torchmoor.wire.imports import (
            without_collections,  # here, because TorchServe hides an ImportError of this file
        )

        with without_collections():
            from handlers.many.metrics import MANY_METRICS
            from handlers.torchserve.batch_reader import BatchReader
            from handlers.torchserve.metrics_publisher import publish_metrics
            from handlers.torchserve.start_many import start_many

        started = time.monotonic()
        BatchReader().install()
        self.service, self.pump = start_many(
            Path(context.system_properties["model_dir"]),
            context.system_properties.get("gpu_id"),
            context.model_yaml_config or {},
            os.environ,
        )
        self.metrics = publish_metrics(context, self.service, MANY_METRICS)
        logging.getLogger("handlers").info("handler ready seconds=%.1f", time.monotonic() - started)

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[bytes]:
        """Return a body for each row, empty without new output. Never raises."""
        return self.pump.handle(rows, context)
