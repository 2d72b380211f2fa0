"""The entry file of the chat archives. TorchServe requires exactly one class here."""

import logging
import os
import time
from pathlib import Path
from typing import Any


class ChatHandler:
    """Serves one checkpoint. TorchServe calls `initialize` once, then `handle` in every step."""

    def initialize(self, context: Any) -> None:
        """Load the model on the device that TorchServe assigned to this worker.

        Raises RuntimeError if a setting is invalid or the checkpoint cannot be loaded.
        """
        logging.getLogger().setLevel(logging.WARNING)  # writing INFO lines takes longer than an engine step
        logging.getLogger("handlers").setLevel(os.environ.get("TORCHMOOR_LOG_LEVEL", "INFO"))
        from torchmoor.wire.imports import (
            without_collections,  # here, because TorchServe hides an ImportError at import
        )

        with without_collections():
            from handlers.chat.metrics import CHAT_METRICS
            from handlers.many.metrics import ADAPTER_METRICS
            from handlers.torchserve.batch_reader import BatchReader
            from handlers.torchserve.metrics_publisher import publish_metrics
            from handlers.torchserve.start_chat import start_chat

        started = time.monotonic()
        BatchReader().install()
        self.service, self.pump, adapters = start_chat(
            Path(context.system_properties["model_dir"]),
            context.system_properties.get("gpu_id"),
            context.model_yaml_config or {},
            os.environ,
        )
        self.metrics = publish_metrics(context, self.service, CHAT_METRICS)
        if adapters is not None:
            publish_metrics(context, adapters, ADAPTER_METRICS)
        logging.getLogger("handlers").info("handler ready seconds=%.1f", time.monotonic() - started)

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[bytes]:
        """Run one step: return a body for each row, empty for rows without an answer yet. Never raises."""
        return self.pump.handle(rows, context)
