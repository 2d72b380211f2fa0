"""Where a model's tensors are, and how many bytes that costs in which memory."""

import torch
from torch import Tensor, nn

from handlers.errors import OutOfMemory


class Placement:
    """Moves one model between host and device. Mapped weights stay mapped, so going back to the host costs nothing.

    What is let go of is free for this process; the registry gives it back to the system.

    mapped: addresses of the tensors that are mapped files, of which the model is made now, on the CPU.
    """

    def __init__(self, model: nn.Module, mapped: frozenset[int], device: torch.device) -> None:
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
            self.to_device()

    @property
    def device_bytes(self) -> int:
        """Private memory on the device; of a CPU, what is not mapped."""
        return self._device_bytes if self._is_on_device else 0

    @property
    def host_bytes(self) -> int:
        """Private memory on the host, none while the model is on the device."""
        return 0 if self._is_on_device else self._own_bytes

    def to_device(self) -> None:
        """Raises OutOfMemory, and then the model is on the host."""
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
        """Off the device; nothing on a CPU."""
        if self._is_on_device and self._device.type != "cpu":
            self._to_host()

    def _to_host(self) -> None:
        for name, tensor in _tensors(self._model).items():
            tensor.data = self._mapped[name] if name in self._mapped else tensor.data.cpu()
        self._is_on_device = False

    def close(self) -> None:
        """Let go of every tensor, whoever still knows the model."""
        for tensor in _tensors(self._model).values():
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        self._mapped.clear()
        self._own_bytes = self._device_bytes = self.mapped_bytes = 0


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Each tensor once, by one of its names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors.values()}.values())
