"""What is remembered of models beyond their time in memory: which are broken, and what each version really takes."""

from collections import OrderedDict
from dataclasses import dataclass

from handlers.errors import ModelBroken

MAX_REMEMBERED = 10_000  # of either kind


@dataclass(frozen=True, slots=True)
class Broken:
    """What is remembered of a model that cannot be used, so that it is not read again for each request."""

    error: ModelBroken
    version: str  # empty if it came to none
    until: float


class Known:
    """Bounded: the oldest is forgotten first."""

    def __init__(self) -> None:
        self._broken: OrderedDict[str, Broken] = OrderedDict()
        self._sizes: OrderedDict[tuple[str, str], int] = OrderedDict()

    def note_broken(self, name: str, broken: Broken) -> None:
        self._broken[name] = broken
        self._broken.move_to_end(name)
        if len(self._broken) > MAX_REMEMBERED:
            self._broken.popitem(last=False)

    def find_broken(self, name: str, now: float) -> Broken | None:
        broken = self._broken.get(name)
        if broken is not None and broken.until <= now:
            del self._broken[name]
            return None
        return broken

    def forget_broken(self, name: str) -> None:
        """It is tried again, whatever became of it before."""
        self._broken.pop(name, None)

    def broken(self, now: float) -> dict[str, Broken]:
        return {name: each for name, each in self._broken.items() if now < each.until}

    def note_size(self, name: str, version: str, num_bytes: int) -> None:
        self._sizes[name, version] = num_bytes
        if len(self._sizes) > MAX_REMEMBERED:
            self._sizes.popitem(last=False)

    def find_size(self, name: str, version: str) -> int | None:
        """Bytes on the device, if it was there before."""
        return self._sizes.get((name, version))
