"""Finds the model in an unpacked folder, lists its files, and reads its JSON files."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from handlers.errors import ModelBroken

CONFIG = "config.json"
TRITON_CONFIG = "config.pbtxt"
OWN_CONFIG = "torchmoor.json"  # what a model's files do not say, such as its task
OWN_KEYS = {"task"}
MAX_NAMED = 5  # unknown keys that an error names
ADAPTER_CONFIG = "adapter_config.json"  # of PEFT
TORCHSCRIPT = "model.pt"  # a model by itself, as TorchServe's users have
CODE = "code"  # SageMaker's folder of inference code, which is never run


def find_model_folder(folder: Path) -> Path:
    """Return where the model is: at the folder's top, or in its only subfolder with a model, as in `model/`.

    Raises ModelBroken, which lists what was found.
    """
    if _is_model(folder):
        return folder
    inside = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    models = [each for each in inside if each.is_dir() and each.name != CODE and _is_model(each)]
    if len(models) == 1:
        return models[0]
    if models:
        raise ModelBroken(f"there are {len(models)} models in it: {', '.join(each.name for each in models[:10])}")
    names = ", ".join(ascii(each.name) for each in inside[:10]) or "nothing"
    raise ModelBroken(
        "there is no config.json, config.pbtxt, model.pt or adapter_config.json at its top or in a folder there; there "
        f"is {names}"
    )


def _is_model(folder: Path) -> bool:
    """Return True for a folder of transformers, Triton, TorchScript or PEFT."""
    return any((folder / name).is_file() for name in (CONFIG, TRITON_CONFIG, TORCHSCRIPT, ADAPTER_CONFIG))


def list_files(folder: Path, on_error: Callable[[OSError], None] = lambda error: None) -> Iterator[Path]:
    """Yield the files in a folder and below, without hidden ones, which editors and unfinished copies leave.

    Follows links, but lists each folder once. on_error: called for a folder that cannot be listed.
    """
    seen: set[tuple[int, int]] = set()
    for base, folders, names in os.walk(folder, onerror=on_error, followlinks=True):
        try:
            status = os.stat(base)
        except OSError as error:
            on_error(error)
            continue
        place = status.st_dev, status.st_ino
        if place in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        yield from (Path(base, name) for name in names if not name.startswith("."))


def read_own_config(folder: Path) -> dict[str, Any]:
    """Read the model's torchmoor.json; {} if it has none. Raises ModelBroken, also for unknown keys."""
    found = dict(read_json(folder, OWN_CONFIG)) if (folder / OWN_CONFIG).is_file() else {}
    unknown = ", ".join(ascii(key)[:100] for key in sorted(found.keys() - OWN_KEYS)[:MAX_NAMED])
    if unknown:
        raise ModelBroken(f"the model's {OWN_CONFIG} has no {unknown}; it may have {', '.join(sorted(OWN_KEYS))}")
    return found


def read_json(folder: Path, name: str, kind: type = dict) -> Any:
    """Read a JSON file with an object, or with another kind. Raises ModelBroken."""
    try:
        found = json.loads((folder / name).read_bytes())
    except FileNotFoundError as exc:
        raise ModelBroken(f"the model has no {name}") from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelBroken(f"the model's {name} is not JSON") from exc
    if not isinstance(found, kind):
        noun = "object" if kind is dict else kind.__name__
        raise ModelBroken(f"the model's {name} is not a JSON {noun}")
    return found
