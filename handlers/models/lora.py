"""LoRA adapters: PEFT's files, and linear layers of the decoder that add an adapter's results to their own.

A step's tokens lie one after the other, those of one adapter side by side. A layer adds to the results of each such
run of tokens what their adapter adds, so that one step computes any mixture of adapters over weights that all share.
Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from handlers.errors import ModelBroken, OutOfMemory, SettingsError
from handlers.models.fast_layers import PackedLinear

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED_WEIGHTS = "adapter_model.bin"  # of older versions of PEFT; not read, because unpickling runs code
MAX_NAME_CHARS = 200
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
MAX_FLOAT_BYTES = 4
MAX_NAMED = 5  # tensors that an error lists
_SIDES = ("A", "B")
# Names before the decoder's `layers`, of text models and of those that see, in present and older transformers.
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)?"
    r"layers\.(?P<layer>\d+\..+)\.lora_(?P<side>[AB])\.weight"
)
# What PEFT can do beside plain LoRA. Each would change the results, so an adapter that uses it is refused.
_REFUSED = (
    *("alora_invocation_tokens", "alpha_pattern", "arrow_config", "fan_in_fan_out", "layer_replication", "lora_bias"),
    *("modules_to_save", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora"),
)
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the base model's weights as well


class AdapterFiles(NamedTuple):
    """The contents of CONFIG and WEIGHTS."""

    config: bytes
    weights: bytes

    @property
    def version(self) -> str:
        """A digest of both."""
        return hashlib.sha256(hashlib.sha256(self.config).digest() + self.weights).hexdigest()

    def read_config(self) -> dict[str, Any]:
        """Return what PEFT says of the adapter. Raises ModelBroken if that is not plain LoRA."""
        try:
            config = json.loads(self.config)
        except (ValueError, RecursionError) as exc:
            raise ModelBroken(f"the adapter's {CONFIG} is not JSON") from exc
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise ModelBroken("the adapter is not of peft_type LORA")
        for name in _REFUSED:
            if config.get(name):
                raise ModelBroken(f"adapters with {name} are not supported")
        if config.get("bias", "none") != "none":
            raise ModelBroken("adapters with bias are not supported")
        initial = config.get("init_lora_weights", True)
        if not isinstance(initial, bool | str | None) or initial not in _INITIAL:
            raise ModelBroken(
                f"adapters with init_lora_weights {ascii(initial)[:40]} belong to changed weights of the base model, "
                "which are not supported: save the adapter with PEFT's path_initial_model_for_weight_conversion"
            )
        for name in ("r", "lora_alpha"):
            value = config.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
                raise ModelBroken(f"the adapter's {name} must be a number above 0")
        return config


def read_files(folder: Path, max_weights_bytes: int) -> AdapterFiles:
    """Read an adapter's files whole. Raises ModelBroken if they are missing or too large."""
    if (folder / PICKLED_WEIGHTS).exists() and not (folder / WEIGHTS).exists():
        raise ModelBroken(
            f"the adapter has {PICKLED_WEIGHTS} and must be converted to {WEIGHTS}: load it on its base model with "
            "PEFT's PeftModel.from_pretrained and write it with save_pretrained"
        )
    return AdapterFiles(_read(folder / CONFIG, MAX_CONFIG_BYTES), _read(folder / WEIGHTS, max_weights_bytes))


class LayerDelta(NamedTuple):
    """What an adapter adds to one layer, x @ down @ up. down: (inputs, rank); up: (rank, outputs), scaled."""

    down: Tensor
    up: Tensor


class LoraAdapter:
    """Implements `Adapter`. deltas: by the names of the layers. version: a digest of its files."""

    def __init__(self, version: str, deltas: Mapping[str, LayerDelta]) -> None:
        self.version = version
        self.deltas = deltas
        self.num_bytes = sum(tensor.nbytes for delta in deltas.values() for tensor in delta)

    def drop(self) -> None:
        self.deltas = {}
        self.num_bytes = 0


class AdaptedLayers:
    """The decoder's linear layers by their names in `layers`, such as `0.self_attn.q_proj`.

    shares: the tokens of the running step that have an adapter. Only the engine's thread computes steps.
    """

    def __init__(self, decoder: Any, max_rank: int) -> None:
        """Wrap the layers. max_rank: largest rank of an adapter's matrices. Raises SettingsError if there are none."""
        self._max_rank = max_rank
        self.shares: Sequence[tuple[slice, LoraAdapter]] = ()
        found = {
            name: module
            for name, module in decoder.layers.named_modules()
            if type(module) in (nn.Linear, PackedLinear) and "experts" not in name.split(".")  # they get chosen tokens
        }
        if not found:
            raise SettingsError("handler.adapters.source: this model has no linear layers that adapters could change")
        self._sizes = {name: (linear.in_features, linear.out_features) for name, linear in found.items()}
        for name, linear in found.items():
            decoder.layers.set_submodule(name, AdaptedLinear(linear, name, self))

    @contextmanager
    def adding(self, shares: Sequence[tuple[slice, LoraAdapter]]) -> Iterator[None]:
        """Let the steps within add these adapters to these tokens."""
        self.shares = shares
        try:
            yield
        finally:
            self.shares = ()

    def read(self, folder: Path, dtype: torch.dtype, device: torch.device) -> LoraAdapter:
        """Load an adapter of PEFT. Its sizes are checked before they take memory. Raises ModelBroken, OutOfMemory."""
        num_floats = self._max_rank * sum(map(sum, self._sizes.values()))
        files = read_files(folder, MAX_HEADER_BYTES + MAX_FLOAT_BYTES * num_floats)
        config = files.read_config()
        try:
            tensors = safetensors.torch.load(files.weights)
        except (SafetensorError, KeyError, ValueError) as exc:
            raise ModelBroken(f"the adapter's {WEIGHTS} cannot be read: {exc}") from exc
        deltas = {}
        for layer, (down, up) in self._pair(tensors).items():
            self._check(layer, down, up, config)
            scaled = up.float() * _scale(config, len(down))
            deltas[layer] = LayerDelta(_own(down, dtype, device).t(), _own(scaled, dtype, device).t())
        return LoraAdapter(files.version, deltas)

    def _pair(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each layer's two matrices. Raises ModelBroken if there is another tensor, or only one of two."""
        pairs: dict[str, dict[str, Tensor]] = {}
        unknown = []
        for name, tensor in tensors.items():
            match = _TENSOR.fullmatch(name)
            if match is None or match["layer"] not in self._sizes:
                unknown.append(name)
            else:
                pairs.setdefault(match["layer"], {})[match["side"]] = tensor
        if unknown:
            listed = ", ".join(ascii(name)[:MAX_NAME_CHARS] for name in sorted(unknown)[:MAX_NAMED])
            raise ModelBroken(f"the adapter changes more than the linear layers of this model's decoder: {listed}")
        if not pairs:
            raise ModelBroken(f"the adapter's {WEIGHTS} is empty")
        for layer, pair in pairs.items():
            if len(pair) < len(_SIDES):
                raise ModelBroken(f"the adapter has only one of the two matrices of {layer}")
        return {layer: (pair["A"], pair["B"]) for layer, pair in pairs.items()}

    def _check(self, layer: str, down: Tensor, up: Tensor, config: Mapping[str, Any]) -> None:
        """Raise ModelBroken unless a layer's matrices fit the model, the configuration and the limit."""
        num_inputs, num_outputs = self._sizes[layer]
        rank = len(down) if down.dim() == 2 else 0
        if rank < 1 or down.shape != (rank, num_inputs) or up.shape != (num_outputs, rank):
            base = config.get("base_model_name_or_path")
            named = f"; its {CONFIG} names the base model {ascii(base)[:MAX_NAME_CHARS]}" if base else ""
            raise ModelBroken(
                f"the adapter's matrices of {layer} have the shapes {tuple(down.shape)} and {tuple(up.shape)}, and "
                f"this model's layer has {num_inputs} inputs and {num_outputs} outputs{named}"
            )
        if rank > self._max_rank:
            raise ModelBroken(f"the adapter's rank is {rank}, over handler.adapters.max_rank ({self._max_rank})")
        if rank != config["r"] and not config.get("rank_pattern"):
            raise ModelBroken(f"the adapter's rank is {rank}, but its {CONFIG} says {config['r']}")
        if not (down.is_floating_point() and up.is_floating_point()):
            raise ModelBroken(f"the adapter's matrices of {layer} do not hold floats")


class AdaptedLinear(nn.Module):
    """A linear layer that adds what the adapters of the running step add. name: in `layers`."""

    def __init__(self, linear: nn.Module, name: str, layers: AdaptedLayers) -> None:
        super().__init__()
        self.linear = linear
        self._name = name
        self._layers = layers

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        for tokens, adapter in self._layers.shares:
            delta = adapter.deltas.get(self._name)
            if delta is not None:
                inputs = x.view(-1, x.shape[-1])[tokens]
                result.view(-1, result.shape[-1])[tokens].addmm_(inputs @ delta.down, delta.up)
        return result


def _read(path: Path, max_bytes: int) -> bytes:
    """Read one of the adapter's files whole. Raises ModelBroken."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError as exc:
        raise ModelBroken(f"the adapter has no {path.name}, as PEFT writes it") from exc
    except OSError as exc:
        raise ModelBroken(f"the adapter's {path.name} cannot be read: {exc.strerror or exc}") from exc
    if len(content) > max_bytes:
        raise ModelBroken(f"the adapter's {path.name} has more than {max_bytes} bytes, which this model cannot use")
    return content


def _scale(config: Mapping[str, Any], rank: int) -> float:
    alpha: float = config["lora_alpha"]
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _own(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy a tensor to the model's device."""
    try:
        return tensor.to(device, dtype, copy=True)
    except RuntimeError as exc:  # torch.OutOfMemoryError on a GPU, a plain one from the CPU's allocator
        raise OutOfMemory("the device has no room for this adapter") from exc
