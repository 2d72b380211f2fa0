"""Memory for a checkpoint: checks that it fits before its weights are read, and recognizes errors of allocation."""

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from handlers.errors import NoMemoryForModel, SettingsError
from handlers.worker.process_memory import group_limits

WHOLE = "model.safetensors"
LFS_POINTER = b"version https://git-lfs"  # begins the text that Git leaves in place of a large file
MEMORY_INFO = Path("/proc/meminfo")
# Bytes by safetensors' type names. A load converts floats and keeps the others.
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_OTHERS = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}


def check_fits(path: Path, device: torch.device, dtype: torch.dtype | None) -> None:
    """Raise NoMemoryForModel if the weights alone exceed the free memory of the device.

    dtype: what floats are converted to, None to keep the stored type.
    """
    needed, free = weight_bytes(path, dtype), free_bytes(device)
    if free is not None and needed > free:
        raise NoMemoryForModel(
            f"the checkpoint's weights take {needed / 1e9:.2f} GB, but {device} has only {free / 1e9:.2f} GB free: "
            "choose a smaller handler.model.dtype or a quantized checkpoint, end what else runs there, or take a "
            "larger device"
        )


def is_out_of_memory(exc: Exception) -> bool:
    """Return True for a failed allocation; torch has no class for one on a CPU."""
    return isinstance(exc, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(exc)


def weight_bytes(path: Path, dtype: torch.dtype | None) -> int:
    """Return the size of a checkpoint's safetensors files once loaded. Raises SettingsError if one is damaged."""
    total = 0
    for header in read_headers(path):
        for kind, shape in header.values():
            size = _FLOATS.get(kind)
            if size is None:
                size = _OTHERS.get(kind, 1)
            elif dtype is not None:
                size = dtype.itemsize
            total += size * math.prod(shape)
    return total


def read_headers(path: Path) -> list[dict[str, tuple[str, list[int]]]]:
    """Return the types and shapes of the tensors in each of a checkpoint's weight files, by name.

    Raises SettingsError if one is damaged.
    """
    return [_read_header(file) for file in weight_files(path)]


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files that transformers reads. Beside them may be the same weights in other forms."""
    if (path / WHOLE).is_file():
        return [path / WHOLE]
    found = sorted(path.glob("*.safetensors"))
    try:
        names = set(json.loads((path / f"{WHOLE}.index.json").read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # the load refuses a wrong one
        return found
    return [file for file in found if file.name in names]


def _read_header(file: Path) -> dict[str, tuple[str, list[int]]]:
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # is not a dict
            return {name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()}
    except (SafetensorError, OSError) as exc:
        is_pointer = isinstance(exc, SafetensorError) and _begins_with(file, LFS_POINTER)
        remedy = "it is a pointer of Git LFS: run git lfs pull there" if is_pointer else f"{exc}; download it again"
        raise SettingsError(f"{file} is not a safetensors file: {remedy}") from exc


def _begins_with(file: Path, start: bytes) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(start)) == start


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a GPU, or of this machine within the limits of its control groups; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not MEMORY_INFO.is_file():
        return None
    lines = dict(line.split(":", 1) for line in MEMORY_INFO.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    return min([free, *(limit - kept for limit, kept in group_limits())])
