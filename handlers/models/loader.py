"""A checkpoint directory to a model that the engine can run."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.utils import logging as transformers_logging

from handlers.errors import ConfigError
from handlers.models.llava import LlavaModel
from handlers.models.probe import Probe
from handlers.models.text import TextModel

logger = logging.getLogger(__name__)


def load_model(path: Path, device: torch.device, dtype: str) -> TextModel:
    """The model in `path`, ready on `device`.

    dtype: a torch type's name, or "auto": float32 on a CPU, the checkpoint's own type elsewhere.
    Only safetensors weights are read, never pickled ones. Raises ConfigError if the directory is no checkpoint, or
    one of a model that would not compute here what it computes in transformers.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"handler.model.path: there is no config.json in {path}")
    transformers_logging.disable_progress_bar()
    try:
        return _load(path, device, dtype)
    except ConfigError:
        raise
    except Exception as exc:  # transformers and safetensors have errors of every kind; TorchServe wants one
        raise ConfigError(f"the checkpoint {path} cannot be used: {type(exc).__name__}: {exc}") from exc


def _load(path: Path, device: torch.device, dtype: str) -> TextModel:
    kind = torch.float32 if dtype == "auto" and device.type == "cpu" else dtype
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    can_see = hasattr(config, "vision_config")
    if can_see and config.model_type != "llava":
        raise ConfigError(f"models of type {config.model_type} are not supported; of those that see, llava is")
    loader = AutoModelForImageTextToText if can_see else AutoModelForCausalLM
    model: Any = loader.from_pretrained(path, dtype=kind, local_files_only=True, use_safetensors=True)
    model = model.to(device).eval().requires_grad_(False)
    logger.info("model loaded type=%s path=%s device=%s dtype=%s", config.model_type, path, device, model.dtype)
    probe = Probe(model)
    loaded: TextModel
    if can_see:
        loaded = LlavaModel(model, AutoProcessor.from_pretrained(path, local_files_only=True))
    else:
        loaded = TextModel(model, AutoTokenizer.from_pretrained(path, local_files_only=True))
    loaded.pack_weights()
    probe.check(loaded)
    return loaded
