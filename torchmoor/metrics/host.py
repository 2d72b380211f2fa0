"""Load of this machine, from Linux' /proc. Other systems report none.

NVIDIA's exporter (dcgm-exporter) reports GPUs, and the handlers report their own memory there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

from torchmoor.metrics.table import HOST, MetricFamilies

_IDLE, _IOWAIT = 3, 4  # columns of /proc/stat


class HostCollector:
    """Collects CPU use since the last scrape and current memory use."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = (0, 0)  # all ticks of all CPUs, and idle ones

    def collect(self) -> Iterator[Metric]:
        try:
            stat, meminfo = (self._proc / "stat").read_text(), (self._proc / "meminfo").read_text()
        except OSError:
            return
        families = MetricFamilies(HOST)
        lines = stat.splitlines()
        ticks = [int(number) for number in lines[0].split()[1:9]]
        total, idle = sum(ticks), ticks[_IDLE] + ticks[_IOWAIT]
        num_cpus = sum(line.startswith("cpu") for line in lines) - 1
        passed, rested = total - self._before[0], idle - self._before[1]
        self._before = (total, idle)
        busy = 1.0 - rested / passed if passed > 0 else 0.0
        families.add("CPUUtilization", (), 100 * num_cpus * busy)
        kilobytes = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
        most, free = (int(kilobytes[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        families.add("MemoryUtilization", (), 100 * (1 - free / most))
        yield from families
