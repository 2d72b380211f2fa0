"""The past of an instance, up to 24 hours: its load, sessions and state, and the use and memory of its GPU."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from torchmoor.admin.dashboard.history import INTERVAL_S, NOW, NUM_SAMPLES, RANGES
from torchmoor.metrics.host import GpuUse
from torchmoor.proxy.instances.instance import SERVING, Instance

FIELDS = ("in_flight", "sessions", "down", "gpu_percent", "gpu_memory_percent")
UNKNOWN = -1.0


class _LoadRing:
    """The last rows of one range. A row has each field's highest value since the previous row."""

    def __init__(self, interval_s: float) -> None:
        self.times = array("d")
        self.values = array("f")  # row after row
        self._interval_s = interval_s
        self._highest = [UNKNOWN] * len(FIELDS)

    def take(self, now: float, row: Sequence[float]) -> None:
        """Keep a row if one is due."""
        self._highest = [max(pair) for pair in zip(self._highest, row, strict=True)]
        if self.times and now - self.times[-1] < self._interval_s - INTERVAL_S / 2:
            return
        self.times.append(now)
        self.values.extend(self._highest)
        self._highest = [UNKNOWN] * len(FIELDS)
        del self.times[:-NUM_SAMPLES], self.values[: -NUM_SAMPLES * len(FIELDS)]


class InstanceHistory:
    """Keeps the samples of the instances of one name."""

    def __init__(self) -> None:
        self._rings = {name: _LoadRing(interval_s) for name, interval_s in RANGES.items()}

    def take(self, now: float, instance: Instance, gpu: GpuUse | None) -> None:
        """Take a sample. now: in monotonic seconds."""
        sessions = instance.reported.open_sessions
        row = (
            instance.outstanding,
            UNKNOWN if sessions is None else sessions,
            instance.state not in SERVING,
            UNKNOWN if gpu is None else gpu.percent,
            UNKNOWN if gpu is None else 100 * gpu.used_bytes / gpu.total_bytes,
        )
        for ring in self._rings.values():
            ring.take(now, row)

    def describe(self, range_name: str) -> dict[str, list[float | None]]:
        """Return a series for each field, oldest first, and `seconds_ago`. None: not known."""
        ring, newest = self._rings[range_name], self._rings[NOW].times[-1:]
        series: dict[str, list[float | None]] = {"seconds_ago": [round(newest[0] - at, 1) for at in ring.times]}
        for number, name in enumerate(FIELDS):
            values = ring.values[number :: len(FIELDS)]
            series[name] = [None if value < 0 else round(value, 1) for value in values]
        return series


def find_gpu(instance: Instance, gpus: Mapping[str, GpuUse]) -> GpuUse | None:
    """Return the use of an instance's GPUs, joined. Each is found by the number or UUID that the launcher assigned."""
    names = [] if instance.gpu is None else instance.gpu.split(",")
    found = [gpus[name] for name in names if name in gpus]
    if not found or len(found) < len(names):
        return None
    if len(found) == 1:
        return found[0]
    return GpuUse(
        name=", ".join(gpu.name for gpu in found),
        uuid=", ".join(gpu.uuid for gpu in found),
        percent=sum(gpu.percent for gpu in found) / len(found),
        used_bytes=sum(gpu.used_bytes for gpu in found),
        total_bytes=sum(gpu.total_bytes for gpu in found),
    )
