"""The memory budget: bytes of the device and the host, and how many of them models take."""

from collections.abc import Iterable
from dataclasses import dataclass

from handlers.errors import OutOfMemory
from handlers.many.model import ResidentModel
from handlers.many.residency.model_entries import ModelEntry


@dataclass(slots=True)
class TierBudget:
    """The bytes of one tier: of the device, the host or the disk."""

    max_bytes: int
    used_bytes: int = 0

    def has_room(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.max_bytes

    def describe(self) -> dict[str, int]:
        return {"used": self.used_bytes, "max": self.max_bytes}


class MemoryBudget:
    """is_unified: device and host are one memory, counted as the device's. Mapped files count like private memory."""

    def __init__(self, device_bytes: int, host_bytes: int, *, is_unified: bool) -> None:
        self.device = TierBudget(device_bytes)
        self.host = TierBudget(0 if is_unified else host_bytes)
        self.is_unified = is_unified

    def count_device(self, entry: ModelEntry, num_bytes: int) -> None:
        """Set the device memory that the entry takes."""
        self.device.used_bytes += num_bytes - entry.device_bytes
        entry.device_bytes = num_bytes

    def count_host(self, entry: ModelEntry, num_bytes: int) -> None:
        """Set the host memory that the entry takes."""
        self.host.used_bytes += num_bytes - entry.host_bytes
        entry.host_bytes = num_bytes

    def on_device(self, model: ResidentModel) -> int:
        """Return what a model on the device takes of its budget."""
        return model.device_bytes + (self.on_host(model) if self.is_unified else 0)

    def on_host(self, model: ResidentModel) -> int:
        """Return what a model takes of the host's memory in its present place."""
        return model.host_bytes + model.mapped_bytes

    def after_demotion(self, entry: ModelEntry) -> int:
        """Return what a model on the device will take of the host's memory once it is there."""
        assert entry.model is not None
        return entry.device_bytes + self.on_host(entry.model)

    def refusal(self, entry: ModelEntry, why: str) -> OutOfMemory:
        """Return the error of a model that gets no room on the device."""
        return OutOfMemory(
            f"the model needs {entry.need_bytes} bytes more on the device, whose budget is {self.device.max_bytes}, "
            f"{self.device.used_bytes} of them taken, {why}"
        )

    def check_integrity(self, entries: Iterable[ModelEntry]) -> None:
        """Raise RuntimeError unless the entries add up to what is counted, within both budgets."""
        held = [(entry.device_bytes, entry.host_bytes) for entry in entries]
        for budget, num_bytes in ((self.device, sum(d for d, _ in held)), (self.host, sum(h for _, h in held))):
            if num_bytes != budget.used_bytes or budget.used_bytes > budget.max_bytes:
                raise RuntimeError(f"{budget} is counted, but the models hold {num_bytes}")
