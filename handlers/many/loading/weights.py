"""Reads a checkpoint's tensors from its files.

Safetensors files are mapped: a tensor is a view of the page cache, not private memory, and the kernel may drop it.
Pickled files can run code, so a setting must allow them, and even then only tensors are read.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from handlers.errors import ModelBroken
from handlers.many.model import LoadProgress
from handlers.models.memory import is_out_of_memory

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"


@dataclass(slots=True)
class Weights:
    """Tensors by their names in the files."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    is_mapped: bool = True  # False: private memory


def read_weights(folder: Path, *, may_unpickle: bool, progress: LoadProgress) -> Weights:
    """Read all tensors of a Hugging Face checkpoint. Raises ModelBroken with the reason."""
    files = _find(folder, SAFETENSORS)
    if files:
        weights = Weights()
        for file, wanted in files.items():
            progress.check()
            weights.tensors.update(_map(file, wanted))
        return weights
    files = _find(folder, PICKLED)
    if not files:
        raise ModelBroken(f"the model has no weights: there is neither {SAFETENSORS} nor its index")
    if not may_unpickle:
        raise ModelBroken(
            f"the model's weights are pickled ({PICKLED}), which can run code: save them as safetensors "
            "(save_pretrained does), or allow them with the setting handler.many.allow_pickle"
        )
    weights = Weights(is_mapped=False)
    for file in files:
        progress.check()
        weights.tensors.update(_unpickle(file))
    return weights


def _find(folder: Path, name: str) -> dict[Path, set[str] | None]:
    """Return the files of the weights, each with its tensors' names; None: all tensors of the file.

    name: of the one file or, if there is an index, of the weights that it lists. Empty if neither exists.
    """
    if (folder / name).is_file():
        return {folder / name: None}
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return {}
    try:
        places = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as exc:
        raise ModelBroken(f"{index.name} is not an index of weights") from exc
    files: dict[Path, set[str] | None] = {}
    for part in sorted({str(part) for part in places.values()}):
        if Path(part).name != part or not (folder / part).is_file():
            raise ModelBroken(f"{index.name} names {part[:200]!r}, which is not in the model's folder")
        files[folder / part] = {tensor for tensor, place in places.items() if place == part}
    if not files:
        raise ModelBroken(f"{index.name} names no files")
    return files


def _map(file: Path, wanted: set[str] | None) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            names = opened.keys() if wanted is None else wanted
            return {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError) as exc:
        raise ModelBroken(f"{file.name} is not a safetensors file, or is damaged: {exc}") from exc


def _unpickle(file: Path) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as exc:  # the unpickler raises any exception
        if is_out_of_memory(exc):
            raise
        raise ModelBroken(f"{file.name} holds more than tensors, or is damaged ({type(exc).__name__})") from exc
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ModelBroken(f"{file.name} is not a table of tensors")
    return {str(name): tensor for name, tensor in found.items()}
