"""Entry file of the archive of many models. TorchServe wants exactly one class here."""

import logging
import os
import time
from pathlib import Path
from typing import Any


class ManyHandler:
    """Many checkpoints in one worker. TorchServe calls `initialize` once, then `handle` for every step."""

    def initialize(self, context: Any) -> None:
        """Find the models' source and take the device that TorchServe has given to this worker.

        Raises RuntimeError on a wrong setting.
        """
        logging.getLogger().setLevel(logging.WARNING)  # TorchServe's own INFO lines cost more than a step
        logging.getLogger("handlers").setLevel(os.environ.get("TORCHMOOR_LOG_LEVEL", "INFO"))
        from handlers.metrics import MANY_METRICS, MetricsPublisher
        from handlers.start_many import start_many  # here, since an ImportError at import would be hidden

        started = time.monotonic()
        self.service, self.pump = start_many(
            Path(context.system_properties["model_dir"]),
            context.system_properties.get("gpu_id"),
            context.model_yaml_config or {},
            os.environ,
        )
        service = self.service
        self.metrics = MetricsPublisher(
            context.metrics, context.model_name, service.numbers, service.drain_times, MANY_METRICS
        )
        self.metrics.start()
        logging.getLogger("handlers").info("handler ready seconds=%.1f", time.monotonic() - started)

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[bytes]:
        """One step: a body for each row, empty for those without news. Never raises."""
        return self.pump.handle(rows, context)
