"""The load history: which models are broken, and how much memory each version takes."""

from collections import OrderedDict
from dataclasses import dataclass

from handlers.errors import ModelBroken

MAX_REMEMBERED = 10_000  # of either kind


@dataclass(frozen=True, slots=True)
class BrokenModel:
    """A failed load, kept so that the model is not read again for each request."""

    error: ModelBroken
    version: str  # empty if it failed before one was found
    until: float


class LoadHistory:
    """Outlives the models in memory. Bounded: the oldest record is dropped first."""

    def __init__(self) -> None:
        self._broken: OrderedDict[str, BrokenModel] = OrderedDict()
        self._sizes: OrderedDict[tuple[str, str], int] = OrderedDict()

    def note_broken(self, name: str, broken: BrokenModel) -> None:
        self._broken[name] = broken
        if len(self._broken) > MAX_REMEMBERED:
            self._broken.popitem(last=False)

    def forget_broken(self, name: str) -> None:
        self._broken.pop(name, None)

    def find_broken(self, name: str, now: float) -> BrokenModel | None:
        broken = self._broken.get(name)
        return broken if broken is not None and now < broken.until else None

    def broken(self, now: float) -> dict[str, BrokenModel]:
        return {name: each for name, each in self._broken.items() if now < each.until}

    def note_size(self, name: str, version: str, num_bytes: int) -> None:
        self._sizes[name, version] = num_bytes
        if len(self._sizes) > MAX_REMEMBERED:
            self._sizes.popitem(last=False)

    def find_size(self, name: str, version: str) -> int | None:
        """Return the measured bytes on the device, None before the first load."""
        return self._sizes.get((name, version))
