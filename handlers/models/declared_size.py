"""Bounds on what a checkpoint declares: its files for configuration, and the model that they describe.

A configuration of a few bytes can describe a model of any size. Counts that transformers uses before it makes a module
are checked by their names. The model itself is built without weights. The size of the checkpoint's tensors limits this
build, so a larger description is refused early, whatever its family calls the size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from handlers.errors import SettingsError
from handlers.settings.model import ModelSettings

# The files that are parsed, by the setting that bounds them.
PARSED = {
    "max_config_bytes": (
        *("*config.json", "*/config.json", "config.pbtxt", "torchmoor.json", "modules.json"),
        *("*_map.json", "added_tokens.json", "chat_template.json", "*.jinja"),
    ),
    "max_tokenizer_bytes": ("tokenizer.json", "vocab.*", "merges.txt", "*.model", "*.index.json"),
}

MAX_LAYERS = 1000
MAX_LABELS = 100_000
# Names of counts for which transformers makes lists, and of those among them that are sizes of tensors.
_LAYERS = ("layer", "depth", "stage", "num_blocks", "first_k_dense", "out_indices")
_SIZES = ("size", "dim", "width", "channel")

# A byte of a file holds two elements at most, and weights may be used twice. What is beyond is for small checkpoints.
ELEMENTS_PER_BYTE, SPARE_ELEMENTS = 8, 1 << 24
CALLS_PER_TENSOR, SPARE_CALLS = 16, 4000
MAX_BUFFER_BYTES = 1 << 30  # of tables that are in no file, such as masks of all positions

_FACTORIES = ("empty", "zeros", "ones", "full", "rand", "randn", "arange", "linspace", "tensor", "eye")


def check_files(folder: Path, settings: ModelSettings) -> None:
    """Raise SettingsError if a file of configuration, templates or vocabulary is larger than the settings allow."""
    for key, patterns in PARSED.items():
        limit = getattr(settings, key)
        for file in (file for pattern in patterns for file in folder.glob(pattern)):
            size = file.stat().st_size if file.is_file() else 0  # a link may lead to nothing
            if size > limit:
                raise SettingsError(f"{file.name} has {size} bytes, more than handler.model.{key} ({limit})")


def check_config(config: Any) -> None:
    """Raise SettingsError if a configuration, as read from JSON, declares too many layers or labels.

    Nested configurations are checked, too.
    """
    pending = [config]
    while pending:
        found = pending.pop()
        if isinstance(found, list):
            pending.extend(found)
        elif isinstance(found, Mapping):
            for key, value in found.items():
                pending.append(value)
                limit = _find_limit(str(key).lower())
                if limit is not None and _largest(value) > limit:
                    raise SettingsError(f"config.json declares {str(key)[:100]} above {limit}")


def _find_limit(key: str) -> int | None:
    if "num_labels" in key:
        return MAX_LABELS
    is_count = any(name in key for name in _LAYERS) and not any(name in key for name in _SIZES)
    return MAX_LAYERS if is_count else None


def _largest(value: Any) -> float:
    """Return the largest number of a value or a list, 0 for others."""
    numbers = value if isinstance(value, list) else [value]
    return max((number for number in numbers if isinstance(number, int | float)), default=0)


class BuildLimit(TorchFunctionMode):
    """Aborts the building of a model that declares far more than its files hold. Applies to this thread.

    num_tensors, num_bytes: in the files. Raises SettingsError from within the block.
    """

    def __init__(self, num_tensors: int, num_bytes: int) -> None:
        super().__init__()
        self._holds = f"{num_tensors} tensors of {num_bytes} bytes"
        self._calls_left = CALLS_PER_TENSOR * num_tensors + SPARE_CALLS
        self._elements_left = ELEMENTS_PER_BYTE * num_bytes + SPARE_ELEMENTS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls_left -= 1
        if self._calls_left < 0:
            raise SettingsError(f"config.json declares more layers than its files hold ({self._holds})")
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and getattr(func, "__name__", "") in _FACTORIES:
            self._elements_left -= made.numel()
            if self._elements_left < 0:
                raise SettingsError(f"config.json declares larger weights than its files hold ({self._holds})")
        return made


def check_buffers(model: Any) -> None:
    """Raise SettingsError if a model without weights has tables too large to compute; they are in no file."""
    num_bytes = sum(buffer.nbytes for _, buffer in model.named_non_persistent_buffers())
    if num_bytes > MAX_BUFFER_BYTES:
        raise SettingsError(f"config.json declares tables of {num_bytes} bytes, more than {MAX_BUFFER_BYTES}")
