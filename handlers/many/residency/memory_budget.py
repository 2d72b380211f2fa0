"""Bytes: what each tier has and what of it is taken, by whom. The shelf decides; this counts."""

from collections.abc import Iterable
from dataclasses import dataclass

from handlers.many.model import Loaded
from handlers.many.residency.entry import Entry


@dataclass(slots=True)
class Budget:
    """Bytes of one tier."""

    max_bytes: int
    used_bytes: int = 0

    def has_room(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.max_bytes


class Ledger:
    """is_unified: the device's memory is the host's, so that all that a model takes is taken on the device.

    count_mapped: whether files that are mapped count like private memory.
    """

    def __init__(self, device_bytes: int, host_bytes: int, *, is_unified: bool, count_mapped: bool) -> None:
        self.device = Budget(device_bytes)
        self.host = Budget(0 if is_unified else host_bytes)
        self._is_unified = is_unified
        self._count_mapped = count_mapped

    def count_device(self, entry: Entry, num_bytes: int) -> None:
        """From now on the entry takes so much there."""
        self.device.used_bytes += num_bytes - entry.device_bytes
        entry.device_bytes = num_bytes

    def count_host(self, entry: Entry, num_bytes: int) -> None:
        self.host.used_bytes += num_bytes - entry.host_bytes
        entry.host_bytes = num_bytes

    def on_device(self, model: Loaded) -> int:
        """What a model that is on the device takes of its budget."""
        return model.device_bytes + (self.on_host(model) if self._is_unified else 0)

    def on_host(self, model: Loaded) -> int:
        """What a model takes of the host's memory, as it stands now."""
        return model.host_bytes + (model.mapped_bytes if self._count_mapped else 0)

    def check_integrity(self, entries: Iterable[Entry]) -> None:
        """Raise RuntimeError unless these are all that is counted, and it fits."""
        held = [(entry.device_bytes, entry.host_bytes) for entry in entries]
        for budget, num_bytes in ((self.device, sum(d for d, _ in held)), (self.host, sum(h for _, h in held))):
            if num_bytes != budget.used_bytes or budget.used_bytes > budget.max_bytes:
                raise RuntimeError(f"{budget} is counted, but the models hold {num_bytes}")
