"""How busy this machine is, under SageMaker's names, from what Linux tells in /proc; nothing where there is none.

GPUs are not here: NVIDIA's own exporter (dcgm-exporter) tells of them, and what the handlers hold on a GPU stands in
their own metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

_IDLE, _IOWAIT = 3, 4  # places in a line of /proc/stat


class HostCollector:
    """CPU since the last scrape, memory at the moment."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = (0, 0)  # all ticks of all CPUs, and idle ones

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        try:
            stat, meminfo = (self._proc / "stat").read_text(), (self._proc / "meminfo").read_text()
        except OSError:
            return
        lines = stat.splitlines()
        ticks = [int(number) for number in lines[0].split()[1:9]]
        total, idle = sum(ticks), ticks[_IDLE] + ticks[_IOWAIT]
        num_cpus = sum(line.startswith("cpu") for line in lines) - 1
        passed, rested = total - self._before[0], idle - self._before[1]
        self._before = (total, idle)
        busy = 1.0 - rested / passed if passed > 0 else 0.0
        yield GaugeMetricFamily(
            "CPUUtilization", "Percent of one CPU, since the last scrape: 400 is four of them.", 100 * num_cpus * busy
        )
        kilobytes = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
        most, free = (int(kilobytes[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        yield GaugeMetricFamily("MemoryUtilization", "Percent of the memory that is in use.", 100 * (1 - free / most))
