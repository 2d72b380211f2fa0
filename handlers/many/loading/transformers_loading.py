"""Loads a checkpoint's folder as a transformers model, in milliseconds and without private memory.

Making a model from its configuration takes longer than reading its files. So each configuration is made once, without
weights (on torch's meta device), as a template. A model is a copy of its template whose parameters are the mapped
tensors of its files (docs/many-models.md has the times). The template computes the values that are not in any file,
such as position ids or rope frequencies, by from_pretrained's own code.

The result equals from_pretrained's, which loads the checkpoints whose names or shapes need a conversion.
"""

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from handlers.errors import ModelBroken, OutOfMemory, SettingsError
from handlers.many.folder import CONFIG, read_json
from handlers.many.loading.shared import SharedParts, digest
from handlers.many.loading.tensor_placement import Assembled
from handlers.many.loading.weights import Weights, read_weights
from handlers.many.model import LoadProgress
from handlers.models.declared_size import BuildLimit, check_config
from handlers.models.memory import is_out_of_memory
from handlers.models.skeleton import build_skeleton, making_lock

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
MAX_NAMED = 5  # keys that an error names
# As imported: while another thread makes a model, the class has one that does nothing.
_tie_weights = PreTrainedModel.tie_weights


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """A model without weights.

    keys: the names of its weights. renamings: transformers' own, from names in files.
    """

    model: Any
    keys: frozenset[str]
    renamings: tuple[WeightRenaming, ...]

    def spellings(self, name: str) -> Iterator[str]:
        """Yield the possible names in the model of a file's tensor, with and without the prefix of the model's body."""
        prefix = f"{self.model.base_model_prefix}."
        renamed = name
        for renaming in self.renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        for own in (name, renamed) if renamed != name else (name,):
            yield own
            yield prefix + own
            if own.startswith(prefix):
                yield own.removeprefix(prefix)


def load_model(
    folder: Path,
    auto: Any,
    dtype: torch.dtype | None,
    shared: SharedParts,
    *,
    may_unpickle: bool,
    progress: LoadProgress,
) -> Assembled:
    """Load a checkpoint's model for inference, on the CPU.

    auto: transformers' AutoModelFor... of the head. dtype: the type of floats; None keeps the stored type.
    Raises ModelBroken with the reason, OutOfMemory.
    """
    weights = read_weights(folder, may_unpickle=may_unpickle, progress=progress)
    kind = dtype or _stored_type(weights)
    key = ("model", auto.__name__, digest([folder / CONFIG, folder / GENERATION_CONFIG]))
    template = shared.get(key, lambda: _make_template(folder, auto, weights))
    progress.check()
    renamed, missing, unread = _match(weights.tensors, template)
    if _needs_conversion(template.model, missing, unread, kind):
        with making_lock:
            return Assembled(_convert(folder, template, kind, weights))
    return _assemble(template, renamed, weights.is_mapped, kind, unread)


def _make_template(folder: Path, auto: Any, weights: Weights) -> UnloadedModel:
    try:
        check_config(read_json(folder, CONFIG))
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        num_bytes = sum(tensor.nbytes for tensor in weights.tensors.values())
        model = build_skeleton(config, auto, BuildLimit(len(weights.tensors), num_bytes))
        _compute_buffers(model)
        if model.can_generate() and (folder / GENERATION_CONFIG).is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except ModelBroken:
        raise
    except SettingsError as exc:
        raise ModelBroken(str(exc)) from exc
    except Exception as exc:  # every family checks its configuration in its own way
        raise ModelBroken(f"no model can be made of {CONFIG}: {_shortened(exc)}") from exc
    model.eval().requires_grad_(False)
    # Checkpoints that need other transforms than renaming are converted.
    renamings = tuple(each for each in get_model_conversion_mapping(model) if type(each) is WeightRenaming)
    return UnloadedModel(model, frozenset(model.state_dict()), renamings)


def _compute_buffers(model: Any) -> None:
    """Compute the buffers that no file has, by from_pretrained's own code; all weights are marked as read."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, own = name.rpartition(".")
        model.get_submodule(parent)._buffers[own] = torch.empty_like(buffer, device="cpu")
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()


def _stored_type(weights: Weights) -> torch.dtype | None:
    """Return the type of the first float tensor, which transformers takes as the checkpoint's type, too."""
    return next((t.dtype for t in weights.tensors.values() if t.is_floating_point()), None)


def _match(tensors: Mapping[str, Tensor], template: UnloadedModel) -> tuple[dict[str, Tensor], set[str], list[str]]:
    """Return the tensors by the model's names, the names without a tensor, and the unused names of files."""
    found: dict[str, Tensor] = {}
    unread = []
    for name, tensor in tensors.items():
        key = next((k for k in template.spellings(name) if k in template.keys), None)
        if key is None or key in found:
            unread.append(name)
        else:
            found[key] = tensor
    return found, set(template.keys - found.keys()), unread


def _needs_conversion(model: Any, missing: set[str], unread: list[str], dtype: torch.dtype | None) -> bool:
    """Return True if from_pretrained may derive the missing weights or stores some in another form."""
    if getattr(model.config, "quantization_config", None) is not None:
        return True
    keeps = model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict
    if any(keeps) and dtype in (torch.float16, torch.bfloat16):
        return True
    return bool(missing - model.all_tied_weights_keys.keys()) and bool(unread or model._keys_to_ignore_on_load_missing)


def _assemble(
    template: UnloadedModel, found: dict[str, Tensor], is_mapped: bool, dtype: torch.dtype | None, unread: list[str]
) -> Assembled:
    mapped = frozenset(tensor.data_ptr() for tensor in found.values()) if is_mapped else frozenset()
    model = copy_module(template.model, {})
    modules = dict(model.named_modules())
    for key, tensor in found.items():
        parent, _, own = key.rpartition(".")
        kept = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        _put(modules[parent], own, key, kept)
    missing = set(template.keys - found.keys())
    _tie_weights(model, missing_keys=missing, recompute_mapping=False)
    _check_complete(template, model, missing, unread)
    return Assembled(model, mapped)


def _put(parent: Any, own: str, key: str, tensor: Tensor) -> None:
    is_parameter = own in parent._parameters
    place = parent._parameters[own] if is_parameter else parent._buffers[own]
    if place.shape != tensor.shape:
        found, wanted = list(tensor.shape), list(place.shape)
        raise ModelBroken(f"the model's weights do not fit its {CONFIG}: {key} is {found}, not {wanted}")
    if is_parameter:
        parent._parameters[own] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        parent._buffers[own] = tensor


def copy_module(module: Any, memo: dict[int, Any]) -> Any:
    """Copy a module with its submodules, buffers and configuration, sharing the parameters.

    copy.deepcopy takes three times as long, mostly for the empty tables of every module. memo: as in deepcopy.
    """
    if id(module) in memo:
        return memo[id(module)]
    copied = memo[id(module)] = object.__new__(type(module))
    own = copied.__dict__
    for name, value in module.__dict__.items():
        if value is None or isinstance(value, bool | int | float | str):
            own[name] = value
        elif name == "_modules":
            own[name] = {key: None if child is None else copy_module(child, memo) for key, child in value.items()}
        elif name == "_parameters" or (isinstance(value, dict | set) and not value):
            own[name] = value.copy()
        elif name == "_buffers":
            own[name] = {key: None if buffer is None else buffer.clone() for key, buffer in value.items()}
        else:
            own[name] = copy.deepcopy(value, memo)
    return copied


def _convert(folder: Path, template: UnloadedModel, dtype: torch.dtype | None, weights: Weights) -> Any:
    """Load by from_pretrained, for weights that are stored in another form."""
    made = template.model
    config = copy.deepcopy(made.config)
    options = {} if not hasattr(made, "pooler") or made.pooler is not None else {"add_pooling_layer": False}
    try:
        model, info = type(made).from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            local_files_only=True,
            use_safetensors=weights.is_mapped,
            weights_only=True,
            output_loading_info=True,
            **options,
        )
    except Exception as exc:  # transformers and its converters raise any exception
        if is_out_of_memory(exc):
            raise OutOfMemory("there is no memory for its converted weights") from exc
        raise ModelBroken(f"the model's weights cannot be read: {_shortened(exc)}") from exc
    _check_complete(template, model, set(info["missing_keys"]), sorted(info["unexpected_keys"]))
    return model.eval().requires_grad_(False)


def _check_complete(template: UnloadedModel, model: Any, missing: set[str], unread: list[str]) -> None:
    """Raise ModelBroken if weights are missing, or if the files have more layers than the configuration.

    Parts that the task does not use, such as another task's head, stay unread, as in transformers.
    """
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    lost = sorted(key for key in missing if not any(pattern.search(key) for pattern in ignored))
    if lost:
        raise ModelBroken(f"the model's weights are incomplete: {_some(lost)} missing")
    extra = [name for name in unread if any(_is_beyond(model, spelling) for spelling in template.spellings(name))]
    if extra:
        raise ModelBroken(f"the model's weights do not fit its {CONFIG}, which has no place for {_some(extra)}")
    if unread:
        logger.info("weights unread number=%d first=%s", len(unread), unread[0])


def _is_beyond(model: Any, name: str) -> bool:
    """Return True for a layer beyond the last one, and for a bias that the model lacks."""
    here = model
    for step in name.split("."):
        if isinstance(here, torch.nn.ModuleList) and step.isdigit() and int(step) >= len(here):
            return True
        if isinstance(here, torch.nn.Linear):
            return getattr(here, step, None) is None
        here = getattr(here, step, None)
        if not isinstance(here, torch.nn.Module):
            return False
    return False


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:200] for name in names[:MAX_NAMED])
    rest = len(names) - MAX_NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown


def _shortened(exc: Exception) -> str:
    """Shorten a library's error for an answer."""
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text[:500]}"
