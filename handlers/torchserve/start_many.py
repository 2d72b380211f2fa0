"""The start of a worker of many models: builds its parts and connects them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.errors import SettingsError
from handlers.many.loading.checkpoint_loader import CheckpointLoader
from handlers.many.metrics import MANY_METRICS
from handlers.many.residency.registry import open_registry
from handlers.many.service import ManyService
from handlers.settings.handler import HandlerSettings, load_settings
from handlers.torchserve.entry import StartedWorker
from handlers.torchserve.pump import Pump, check_batch_size
from handlers.worker.device import choose_device
from handlers.worker.process_memory import bound_freed_memory


def start_many(
    worker_dir: Path, gpu_id: int | None, config: Mapping[str, Any], environ: Mapping[str, str]
) -> StartedWorker:
    """Start a service of many models and make its pump.

    worker_dir: where TorchServe has unpacked the worker's archive; config: its model-config. Raises RuntimeError
    (SettingsError) for a wrong setting.
    """
    bound_freed_memory()
    settings = load_settings(config.get("handler") or {}, environ)
    check_engine(settings)
    check_batch_size(config, settings.pump)
    device = choose_device(gpu_id)
    torch.set_num_threads(settings.tasks.threads_per_batch)
    ids = SessionIdMinter.from_environment(environ)
    loader = CheckpointLoader(settings, device, ids, environ)
    registry = open_registry(settings.many, worker_dir, loader, device)
    service = ManyService(registry, loader, ids.instance, str(device))
    return StartedWorker(service, Pump(settings.pump, service.start, service.counters), [(service, MANY_METRICS)])


def check_engine(settings: HandlerSettings) -> None:
    """Raise SettingsError unless the settings select the built-in engine without adapters."""
    if settings.adapters.source:
        raise SettingsError("handler.adapters.source is for a chat archive, whose one model has the adapters")
    if settings.engine.name != "builtin":
        raise SettingsError(
            f"handler.engine.name is {settings.engine.name}, but a worker of many models has the built-in engine only"
        )
