"""TorchScript models in Triton's layout.

    config.pbtxt          names, types and shapes of inputs and outputs
    1/model.pt            the traced or scripted model; the newest of several versions is used

A TorchScript file is a program, so a setting must allow it. A folder with only a model.pt, as TorchServe users have,
works too: the model gets the inputs in the order of the request.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from handlers.errors import InvalidRequest, ModelBroken
from handlers.many.compute import TaskRow
from handlers.many.folder import CONFIG, TORCHSCRIPT, TRITON_CONFIG
from handlers.many.request import TaskRequest
from handlers.many.tasks.open_inference import MAX_DIMENSIONS, MAX_TENSORS, NAMES, TYPES, TensorForm, read_tensor
from handlers.many.tasks.pbtxt import Message, parse_pbtxt
from handlers.many.tasks.task import Input, TaskWork
from handlers.requests.reply import PendingReply


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of config.pbtxt. shape: without the batch; -1 for any size."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """max_batch_size: 0 if the tensors have no batch dimension."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    max_batch_size: int = 0
    file: str = TORCHSCRIPT


def is_triton(folder: Path) -> bool:
    """Return True if the folder holds a model of this kind."""
    return (folder / TRITON_CONFIG).is_file() or ((folder / TORCHSCRIPT).is_file() and not (folder / CONFIG).is_file())


def read_config(folder: Path) -> TritonConfig:
    """Read config.pbtxt. Raises ModelBroken with the reason."""
    if not (folder / TRITON_CONFIG).is_file():
        return TritonConfig()
    try:
        fields = parse_pbtxt((folder / TRITON_CONFIG).read_text())
        backend = _single(fields, "backend", "") or _single(fields, "platform", "")
        if backend not in ("pytorch", "pytorch_libtorch"):
            raise ValueError(f"models of backend {backend!r} are not served here, only pytorch (TorchScript)")
        file = _single(fields, "default_model_filename", TORCHSCRIPT)
        if Path(file).name != file:
            raise ValueError("default_model_filename must be a file's plain name")
        max_batch_size = _single(fields, "max_batch_size", 0)
        if max_batch_size < 0:
            raise ValueError("max_batch_size must not be negative")
        return TritonConfig(
            inputs=_in_order(tuple(_spec(each) for each in fields.get("input", []))),
            outputs=_in_order(tuple(_spec(each) for each in fields.get("output", []))),
            max_batch_size=max_batch_size,
            file=file,
        )
    except (ValueError, TypeError, OSError) as exc:
        raise ModelBroken(f"the model's {TRITON_CONFIG} cannot be used: {exc}") from exc


def _spec(fields: Any) -> TensorSpec:
    if not isinstance(fields, dict):
        raise ValueError("an input or output is not a message")
    name, kind = _single(fields, "name", ""), _single(fields, "data_type", "TYPE_INVALID")
    dtype = TYPES.get(kind.removeprefix("TYPE_"))
    shape = tuple(fields.get("dims", ()))
    if not name or dtype is None:
        raise ValueError(f"the tensor {name!r} of type {kind} has no name or a type that is not served here")
    if len(shape) > MAX_DIMENSIONS or not all(type(d) is int and (d > 0 or d == -1) for d in shape):
        raise ValueError(f"the dims of {name!r} must be positive numbers, or -1 for any")
    return TensorSpec(name, dtype, shape)


def _single(fields: Message, name: str, default: Any) -> Any:
    found = fields.get(name, [default])
    if len(found) != 1 or type(found[0]) is not type(default):
        raise ValueError(f"{name} must be given once, as {type(default).__name__}")
    return found[0]


def _in_order(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Return the tensors in the order of the model's arguments or outputs."""
    return tuple(spec for _, spec in sorted(zip(_places(specs), specs, strict=True), key=lambda pair: pair[0]))


def _places(specs: Sequence[TensorSpec]) -> list[int]:
    """Return each tensor's place by Triton's rule: N of a name that ends in __N, else the order of the file."""
    found = [re.search(r"__(\d+)$", spec.name) for spec in specs]
    if all(found):
        return [int(place[1]) for place in found if place]
    return list(range(len(specs)))


class TritonTask:
    """Maps tensors to tensors."""

    name = "tensors"

    def __init__(
        self, module: torch.jit.ScriptModule, config: TritonConfig, version: str, device: torch.device
    ) -> None:
        self.module = module
        self._config = config
        self._version = version
        self._device = device

    @classmethod
    def load(cls, folder: Path, device: torch.device, *, is_allowed: bool) -> "TritonTask":
        """Load a folder. Raises ModelBroken, also if TorchScript is not allowed."""
        config = read_config(folder)
        versions = sorted((d for d in folder.iterdir() if d.is_dir() and d.name.isdigit()), key=lambda d: int(d.name))
        home = versions[-1] if versions else folder
        if not (home / config.file).is_file():
            raise ModelBroken(f"the model has no TorchScript file 1/{config.file}")
        if not is_allowed:
            raise ModelBroken(
                "the model is TorchScript, which is a program: allow it with the setting "
                "handler.many.allow_torchscript if you trust its maker, or bring the model as safetensors"
            )
        try:
            module = torch.jit.load(str(home / config.file), map_location="cpu")
        except (RuntimeError, ValueError, OSError) as exc:
            cause = str(exc).splitlines()[0][:300]
            raise ModelBroken(f"{config.file} is not TorchScript: {cause}") from exc
        return cls(module.eval(), config, home.name if versions else "1", device)

    def read(self, request: TaskRequest, reply: PendingReply) -> TaskWork:
        given: dict[str, Tensor] = {}
        if not 0 < len(request.inputs) <= MAX_TENSORS:
            raise InvalidRequest(f"a request has 1 to {MAX_TENSORS} tensors", param="inputs")
        for each in request.inputs:
            name, tensor = read_tensor(each)
            if name in given:
                raise InvalidRequest(f"the input {name[:100]!r} is given twice", param="inputs")
            given[name] = tensor
        tensors = self._check(given)
        form: TensorForm = request.parameters["form"]
        if self._config.outputs:
            _check_wanted(form, self._output_names(0))

        def finish(outputs: Sequence[Any]) -> Any:
            names = self._output_names(len(outputs[0]))
            _check_wanted(form, names)
            named = zip(names, outputs[0], strict=True)
            wanted = [(name, tensor) for name, tensor in named if not form.names or name in form.names]
            return form.encode(self._version, wanted)

        can_join = self._config.max_batch_size > 0 and bool(self._config.inputs)  # whose batch sizes are checked
        kind = tuple((t.dtype, tuple(t.shape[1:])) for t in tensors) if can_join else object()
        return TaskWork([Input(tensors, 1, kind)], finish)

    def _check(self, given: dict[str, Tensor]) -> list[Tensor]:
        """Return the inputs in the model's order. Raises InvalidRequest."""
        specs = self._config.inputs
        if not specs:
            return list(given.values())
        if given.keys() != {spec.name for spec in specs}:
            raise InvalidRequest(f"the inputs must be {', '.join(spec.name for spec in specs)}", param="inputs")
        limit, tensors = self._config.max_batch_size, [given[spec.name] for spec in specs]
        for spec, tensor in zip(specs, tensors, strict=True):
            _check_tensor(spec, tensor, has_batch=limit > 0)
        if limit:
            sizes = {len(tensor) for tensor in tensors}
            if len(sizes) > 1 or not 0 < min(sizes) <= limit:
                raise InvalidRequest(f"the inputs must have one batch size, of 1 to {limit}", param="inputs")
        return tensors

    def run(self, rows: Sequence[TaskRow]) -> Sequence[Any]:
        """Return the outputs of each row, a list of tensors on the CPU."""
        limit = self._config.max_batch_size if self._config.inputs else 0  # others may have no batch
        outputs: list[Any] = []
        waiting = list(rows)
        while waiting:
            group = [waiting.pop(0)]
            size = len(group[0].inputs[0]) if limit else 0
            while limit and waiting and size + len(waiting[0].inputs[0]) <= limit:
                size += len(waiting[0].inputs[0])
                group.append(waiting.pop(0))
            outputs += self._run_group(group)
        return outputs

    def _run_group(self, group: Sequence[TaskRow]) -> list[list[Tensor]]:
        if len(group) == 1:
            return [self._call(group[0].inputs)]
        joined = [torch.cat(parts) for parts in zip(*(row.inputs for row in group), strict=True)]
        sizes = [len(row.inputs[0]) for row in group]
        whole = self._call(joined)
        if any(len(tensor) != sum(sizes) for tensor in whole):
            raise RuntimeError("an output has no dimension for the batch")
        return [list(parts) for parts in zip(*(tensor.split(sizes) for tensor in whole), strict=True)]

    def _call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        found = self.module(*(tensor.to(self._device) for tensor in tensors))
        if isinstance(found, dict):
            found = [found[name] for name in [spec.name for spec in self._config.outputs] or found]
        else:
            found = [found] if isinstance(found, Tensor) else found
            found = self._named(found) if self._config.outputs else found
        return [tensor.cpu() for tensor in found]

    def _named(self, found: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs that the configuration names, which may be a part of the model's."""
        places = _places(self._config.outputs)
        if max(places) >= len(found):
            raise RuntimeError(
                f"the model gives {len(found)} outputs, but {TRITON_CONFIG} names output {max(places)}, from 0"
            )
        return [found[place] for place in places]

    def _output_names(self, num_outputs: int) -> list[str]:
        return [spec.name for spec in self._config.outputs] or [f"OUTPUT__{i}" for i in range(num_outputs)]

    def describe(self) -> dict[str, Any]:
        """Return the model's metadata. Without config.pbtxt, inputs and outputs are unknown."""
        batch = [-1] if self._config.max_batch_size > 0 else []

        def describe_all(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
            return [{"name": s.name, "datatype": NAMES[s.dtype], "shape": [*batch, *s.shape]} for s in specs]

        return {
            "versions": [self._version],
            "platform": "pytorch_libtorch",
            "inputs": describe_all(self._config.inputs),
            "outputs": describe_all(self._config.outputs),
        }


def _check_tensor(spec: TensorSpec, tensor: Tensor, *, has_batch: bool) -> None:
    if tensor.dtype is not spec.dtype:
        found, wanted = NAMES[tensor.dtype], NAMES[spec.dtype]
        raise InvalidRequest(f"the input {spec.name!r} must be {wanted}, not {found}", param="inputs")
    whole = [*(["batch"] if has_batch else []), *spec.shape]
    if tensor.dim() != len(whole) or any(w not in (-1, "batch", s) for w, s in zip(whole, tensor.shape, strict=True)):
        raise InvalidRequest(f"the shape of {spec.name!r} must be {whole}, not {list(tensor.shape)}", param="inputs")


def _check_wanted(form: TensorForm, names: Sequence[str]) -> None:
    """Raise InvalidRequest if the request asks for an output that does not exist."""
    unknown = next((name[:100] for name in form.names if name not in names), None)
    if unknown is not None:
        raise InvalidRequest(f"there is no output {unknown!r}; there are: {', '.join(names)}", param="outputs")
