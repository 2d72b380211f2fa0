"""Builds the parts of a worker and joins them."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from handlers.adapter import Pump
from handlers.chat.intake import ImageIntake
from handlers.chat.service import ChatService
from handlers.chat.session_id import SessionIds
from handlers.engine.engine import Engine
from handlers.engine.runner import ModelRunner
from handlers.engine.scheduler import Scheduler
from handlers.errors import ConfigError
from handlers.journal.url import open_journal
from handlers.models.loader import load_model
from handlers.settings import load_settings

logger = logging.getLogger(__name__)


def start_chat(
    archive: Path, gpu_id: int | None, config: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[ChatService, Pump]:
    """A running chat service and the pump that feeds it.

    archive: the unpacked archive; config: its model-config's `handler:` group.
    Raises RuntimeError (ConfigError) if a setting or the checkpoint is wrong.
    """
    settings = load_settings(config, environ)
    device = choose_device(gpu_id)
    torch.set_num_threads(settings.engine.num_threads)
    try:
        model = load_model(archive / settings.model.path, device, settings.model.dtype)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"the checkpoint {settings.model.path} cannot be loaded: {exc}") from exc
    scheduler = Scheduler(settings.engine.max_rows, settings.engine.prefill_chunk)
    engine = Engine(ModelRunner(model), scheduler, settings.engine.num_threads)
    ids = SessionIds.from_environment(environ)
    journal = open_journal(settings.journal, settings.session.tombstone_s)
    service = ChatService(settings, model, engine, ids, ImageIntake(settings.intake), journal=journal)
    engine.start()
    return service, Pump(settings.pump, service.start)


def choose_device(gpu_id: int | None) -> torch.device:
    """The accelerator that TorchServe assigned, the CPU when there is none."""
    if gpu_id is not None and torch.cuda.is_available():
        return torch.device(f"cuda:{gpu_id}")
    return torch.device("cpu")
