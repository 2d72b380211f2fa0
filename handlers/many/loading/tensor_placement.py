"""A model on the host or the device: moves its tensors, and counts their bytes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from handlers.errors import OutOfMemory


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model, and the addresses of its tensors that are mapped files; those are on the CPU."""

    model: Any
    mapped: frozenset[int] = frozenset()


class PlacedModel:
    """The base of resident models. Moves the model to the device when it is made.

    Mapped weights stay mapped, so moving them back to the host is free. Released memory belongs to this process; the
    registry returns it to the system.
    """

    def __init__(self, assembled: Assembled, device: torch.device) -> None:
        model, mapped = assembled.model, assembled.mapped
        self._model = model
        self._device = device
        self._is_on_device = True
        tensors = _tensors(model)
        self._mapped = {name: t.detach() for name, t in tensors.items() if t.data_ptr() in mapped}
        self.mapped_bytes = _num_bytes(self._mapped)
        self._own_bytes = _num_bytes(tensors) - self.mapped_bytes
        self._device_bytes = self._own_bytes
        if device.type != "cpu":
            self._is_on_device = False
            PlacedModel.to_device(self)  # a subclass is not complete yet

    def holds(self, session_id: str) -> bool:
        """Return whether a session is open here; only models that chat have sessions."""
        return False

    @property
    def device_bytes(self) -> int:
        """Private memory on the device; on a CPU, memory that is not mapped."""
        return self._device_bytes if self._is_on_device else 0

    @property
    def host_bytes(self) -> int:
        """Private memory on the host, 0 while the model is on the device."""
        return 0 if self._is_on_device else self._own_bytes

    def to_device(self) -> None:
        """Move the model to the device. Raises OutOfMemory and leaves it on the host."""
        if self._is_on_device:
            return
        try:
            self._model.to(self._device)
        except torch.OutOfMemoryError as exc:
            self._to_host()
            raise OutOfMemory("the device has no room for this model") from exc
        self._is_on_device = True
        self._device_bytes = _num_bytes(_tensors(self._model))

    def to_host(self) -> None:
        """Move the model off a GPU; no effect on a CPU."""
        if self._is_on_device and self._device.type != "cpu":
            self._to_host()

    def _to_host(self) -> None:
        for name, tensor in _tensors(self._model).items():
            tensor.data = self._mapped[name] if name in self._mapped else tensor.data.cpu()
        self._is_on_device = False

    def close(self) -> None:
        """Release the memory of every tensor, even while the model is still referenced."""
        for tensor in _tensors(self._model).values():
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        self._mapped.clear()
        self._own_bytes = self._device_bytes = self.mapped_bytes = 0


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors.values()}.values())
