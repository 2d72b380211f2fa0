"""The start of a chat worker: builds its parts and connects them."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from handlers.chat.images.loader import ImageLoader
from handlers.chat.metrics import CHAT_METRICS
from handlers.chat.service import ChatService
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.engine.open_engine import open_engine
from handlers.journal.url import open_journal
from handlers.many.adapters import open_adapters
from handlers.many.metrics import ADAPTER_METRICS
from handlers.models.checkpoint import find_checkpoint
from handlers.models.declared_size import check_files
from handlers.settings.handler import load_settings
from handlers.settings.tgi_lmi import SAGEMAKER_MODEL, apply_foreign_settings
from handlers.torchserve.entry import StartedWorker
from handlers.torchserve.pump import Pump, check_batch_size
from handlers.worker.counters import Metric
from handlers.worker.process_memory import bound_freed_memory
from torchmoor.wire.checkpoint_places import PROPERTIES_FOLDER
from torchmoor.wire.handler_variables import MODEL_PATH

logger = logging.getLogger(__name__)


def start_chat(
    worker_dir: Path, gpu_id: int | None, config: Mapping[str, Any], environ: Mapping[str, str]
) -> StartedWorker:
    """Start a chat service and what feeds it.

    worker_dir: where TorchServe has unpacked the worker's archive; config: its model-config.
    Raises RuntimeError (SettingsError) if a setting or the checkpoint is wrong.
    """
    bound_freed_memory()
    groups = apply_foreign_settings(config.get("handler") or {}, environ, property_folders(worker_dir, environ))
    settings = load_settings(groups, environ)
    check_batch_size(config, settings.pump)
    checkpoint = find_checkpoint(settings.model, worker_dir, environ)
    check_files(checkpoint, settings.model)
    prompts, engine = open_engine(settings, checkpoint, gpu_id)
    ids = SessionIdMinter.from_environment(environ)
    journal = open_journal(settings.journal, settings.session.tombstone_s, ids.keys)
    adapters = open_adapters(settings, worker_dir, engine)
    service = ChatService(
        settings, prompts, engine, ids, ImageLoader(settings.intake), journal=journal, adapters=adapters
    )
    engine.start()
    start = service.start if adapters is None else adapters.before(service.start)
    metrics: list[tuple[Any, Sequence[Metric]]] = [(service, CHAT_METRICS)]
    if adapters is not None:
        metrics.append((adapters, ADAPTER_METRICS))
    return StartedWorker(service, Pump(settings.pump, start, service.counters), metrics)


def property_folders(worker_dir: Path, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders that may have a serving.properties: SageMaker's, the checkpoint's own, and the archive's.

    What starts the instance may name SageMaker's. The checkpoint's is the directory that `torchmoor up` names, or the
    archive's folder `model`.
    """
    named = environ.get(MODEL_PATH, "")
    own = Path(named) if named.startswith("/") else worker_dir / "model"
    return Path(environ.get(PROPERTIES_FOLDER) or SAGEMAKER_MODEL), own, worker_dir
