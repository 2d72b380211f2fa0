"""The start of a chat worker: builds its parts and connects them."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from handlers.adapter import Pump
from handlers.chat.pictures.loader import ImageLoader
from handlers.chat.service import ChatService
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.device import choose_device
from handlers.engine.engine import make_engine
from handlers.engine.runner import cache_shape
from handlers.errors import OutOfMemory, SettingsError
from handlers.journal.url import open_journal
from handlers.models.checkpoint import find_checkpoint
from handlers.models.declared_size import check_files
from handlers.models.loader import load_model
from handlers.models.text import TextModel
from handlers.process_memory import keep_no_large_blocks
from handlers.settings import ChatSessionSettings, PumpSettings, load_settings
from handlers.tgi_lmi_settings import SAGEMAKER_MODEL, understand
from torchmoor.wire.checkpoint_places import MODEL_PATH, PROPERTIES_FOLDER

logger = logging.getLogger(__name__)
DEFAULT_CPU_KV_BYTES = 1 << 30
STEP_BYTES = 512 << 20  # of a GPU: activations, workspaces and graphs, beside the logits


def start_chat(
    worker_dir: Path, gpu_id: int | None, config: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[ChatService, Pump]:
    """Start a chat service and the pump that feeds it.

    worker_dir: where TorchServe has unpacked the worker's archive; config: its model-config.
    Raises RuntimeError (SettingsError) if a setting or the checkpoint is wrong.
    """
    keep_no_large_blocks()
    groups = understand(config.get("handler") or {}, environ, property_folders(worker_dir, environ))
    settings = load_settings(groups, environ)
    check_batch_size(config, settings.pump)
    device = choose_device(gpu_id)
    torch.set_num_threads(settings.engine.num_threads)
    checkpoint = find_checkpoint(settings.model, worker_dir, environ)
    own = settings.model
    check_files(checkpoint, own)
    model = load_model(checkpoint, device, own.dtype, attention=own.attention, is_compiled=own.compile == "layers")
    try:
        engine = make_engine(model, choose_kv_bytes(settings.session, model, settings.engine.max_rows), settings.engine)
    except OutOfMemory as exc:
        raise SettingsError(f"handler.session: {exc.message}; give it fewer kv_bytes or kv_tokens") from exc
    ids = SessionIdMinter.from_environment(environ)
    journal = open_journal(settings.journal, settings.session.tombstone_s, ids.keys)
    service = ChatService(settings, model, engine, ids, ImageLoader(settings.intake), journal=journal)
    engine.start()
    return service, Pump(settings.pump, service.start, service.counters)


def property_folders(worker_dir: Path, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders that may have a serving.properties: SageMaker's, the checkpoint's own, and the archive's.

    What starts the instance may name SageMaker's. The checkpoint's is the directory that `torchmoor up` names, or the
    archive's folder `model`.
    """
    named = environ.get(MODEL_PATH, "")
    own = Path(named) if named.startswith("/") else worker_dir / "model"
    return Path(environ.get(PROPERTIES_FOLDER) or SAGEMAKER_MODEL), own, worker_dir


def check_batch_size(config: Mapping[str, Any], settings: PumpSettings) -> None:
    """Raise SettingsError unless TorchServe passes more rows than the pump accepts."""
    num_rows = config.get("batchSize", 1)
    if num_rows <= settings.max_in_flight:
        raise SettingsError(
            f"handler.pump.max_in_flight must be below the archive's batchSize ({num_rows}), not "
            f"{settings.max_in_flight}: what is beyond it would wait unseen in TorchServe"
        )


def choose_kv_bytes(settings: ChatSessionSettings, model: TextModel, max_rows: int) -> int:
    """Return the device memory for keys and values: by the settings, else what is left of this worker's GPU share.

    Raises SettingsError if nothing is left.
    """
    if settings.kv_bytes:
        return settings.kv_bytes
    if settings.kv_tokens:
        return cache_shape(model).num_bytes(settings.kv_tokens)
    if model.device.type != "cuda":
        return DEFAULT_CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(model.device)
    own = int(total * settings.device_fraction) - torch.cuda.memory_reserved(model.device)
    step = STEP_BYTES + 3 * 4 * max_rows * model.vocabulary  # logits of the graphs, twice the largest's, and of a step
    left = min(own, free) - settings.features_bytes - step
    if left <= 0:
        raise SettingsError(
            f"the model and features_bytes leave nothing of {settings.device_fraction} of this GPU's {total} bytes for "
            "keys and values: raise handler.session.device_fraction, or use a larger GPU or a smaller dtype"
        )
    return left
