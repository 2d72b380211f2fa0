"""A model's folder: where the model is in it, and its JSON files."""

import json
from pathlib import Path
from typing import Any

from handlers.errors import ModelBroken

CONFIG = "config.json"
TRITON_CONFIG = "config.pbtxt"
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
        f"there is no config.json, config.pbtxt or model.pt at its top or in a folder there; there is {names}"
    )


def _is_model(folder: Path) -> bool:
    """Return True for a folder of transformers, Triton or TorchScript."""
    return any((folder / name).is_file() for name in (CONFIG, TRITON_CONFIG, TORCHSCRIPT))


def read_json(folder: Path, name: str, kind: type = dict) -> Any:
    """Read a JSON file with an object, or with another kind. Raises ModelBroken."""
    try:
        found = json.loads((folder / name).read_bytes())
    except FileNotFoundError as exc:
        raise ModelBroken(f"the model has no {name}") from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelBroken(f"the model's {name} is no JSON") from exc  # prose: allow
    if not isinstance(found, kind):
        noun = "object" if kind is dict else kind.__name__
        raise ModelBroken(f"the model's {name} is no JSON {noun}")  # prose: allow
    return found
