"""Starts the built-in engine: its device, its model, and its memory for keys and values."""

from pathlib import Path

import torch

from handlers.engine.builtin.chat_engine import BuiltinEngine, make_builtin_engine
from handlers.engine.builtin.kv_cache import cache_shape
from handlers.errors import InternalError, OutOfMemory, SettingsError
from handlers.models.loader import load_model
from handlers.models.text import TextModel
from handlers.settings.handler import HandlerSettings
from handlers.settings.session import ChatSessionSettings
from handlers.worker.device import choose_device

DEFAULT_CPU_KV_BYTES = 1 << 30
STEP_BYTES = 512 << 20  # of a GPU, for activations, workspaces and graphs; logits are added


def open_builtin(settings: HandlerSettings, checkpoint: Path, gpu_id: int | None) -> tuple[TextModel, BuiltinEngine]:
    """Load the model on the device that TorchServe assigned. Raises SettingsError."""
    device = choose_device(gpu_id)
    torch.set_num_threads(settings.engine.num_threads)
    own = settings.model
    try:
        model = load_model(
            checkpoint,
            device,
            own.dtype,
            attention=own.attention,
            is_compiled=own.compile == "layers",
            max_rank=settings.adapters.max_rank if settings.adapters.source else 0,
        )
    except InternalError as exc:
        raise SettingsError(exc.message) from exc  # TorchServe logs it in one line
    try:
        adapter_bytes = settings.adapters.max_bytes if settings.adapters.source else 0
        kv_bytes = choose_kv_bytes(settings.session, model, settings.engine.max_rows, adapter_bytes)
        return model, make_builtin_engine(model, kv_bytes, settings.engine, settings.grammar)
    except OutOfMemory as exc:
        raise SettingsError(f"handler.session: {exc.message}; give it fewer kv_bytes or kv_tokens") from exc


def choose_kv_bytes(settings: ChatSessionSettings, model: TextModel, max_rows: int, adapter_bytes: int = 0) -> int:
    """Return the device memory for keys and values: by the settings, else what is left of this worker's GPU share.

    adapter_bytes: reserved for adapters. Raises SettingsError if nothing is left.
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
    left = min(own, free) - settings.features_bytes - adapter_bytes - step
    if left <= 0:
        raise SettingsError(
            f"the model, features_bytes and adapters leave nothing of {settings.device_fraction} of this GPU's {total} "
            "bytes for keys and values: raise handler.session.device_fraction, or use a larger GPU or a smaller dtype"
        )
    return left
