"""Load of this machine: CPUs and memory from Linux' /proc, GPUs from NVIDIA's driver (extra `gpu`).

Values that a machine does not have are not reported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from prometheus_client.core import Metric

from torchmoor.metrics.definition import MetricFamilies, gauge

try:
    import pynvml
except ImportError:
    pynvml = None

logger = logging.getLogger(__name__)

HOST = (
    gauge("CPUUtilization", "CPU use since the last scrape; 400 is four busy CPUs.", (), "percent"),
    gauge("MemoryUtilization", "Memory in use.", (), "percent"),
    gauge("GPUUtilization", "GPU use, on machines with GPUs; 200 is two busy GPUs.", (), "percent"),
    gauge("GPUMemoryUtilization", "GPU memory in use; 200 is two full GPUs.", (), "percent"),
)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The use of a GPU now. name: its number; uuid: as CUDA_VISIBLE_DEVICES may name it."""

    name: str
    uuid: str
    percent: float
    used_bytes: int
    total_bytes: int


_IDLE, _IOWAIT = 3, 4  # columns of /proc/stat


class Gpus:
    """Reads the use of this machine's GPUs. nvml: NVIDIA's management library; None if it is not installed."""

    def __init__(self, nvml: ModuleType | None = pynvml) -> None:
        self._nvml = nvml
        self._handles: list[object] | None = None  # found at the first reading
        self._failure = ""  # of the last reading

    def read(self) -> list[GpuUse]:
        """Return the GPUs' use; none, with one warning until it succeeds again, if the driver fails."""
        nvml = self._nvml
        if nvml is None:
            return []
        try:
            if self._handles is None:
                self._handles = self._find(nvml)
            found = []
            for number, gpu in enumerate(self._handles):
                memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
                percent = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
                found.append(GpuUse(str(number), nvml.nvmlDeviceGetUUID(gpu), percent, memory.used, memory.total))
        except nvml.NVMLError as error:
            if self._failure != str(error):  # a GPU that is divided (MIG) fails at each reading, every two seconds
                logger.warning("GPUs could not be measured error=%s", error)
            self._failure = str(error)
            return []
        self._failure = ""
        return found

    @staticmethod
    def _find(nvml: ModuleType) -> list[object]:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:  # there is no driver here
            return []
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


class HostCollector:
    """Collects CPU use since the last scrape, and the current use of memory and GPUs.

    nvml: NVIDIA's management library; None if it is not installed.
    """

    def __init__(self, proc: Path = Path("/proc"), nvml: ModuleType | None = pynvml) -> None:
        self._proc = proc
        self._gpus = Gpus(nvml)
        self._before = (0, 0)  # all ticks of all CPUs, and idle ones

    def collect(self) -> Iterator[Metric]:
        families = MetricFamilies(HOST)
        self._add_cpus(families)
        self._add_gpus(families)
        yield from (family for family in families if family.samples)

    def _add_cpus(self, families: MetricFamilies) -> None:
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
        # The count of iowait may become less.
        busy = min(1.0, max(0.0, 1.0 - rested / passed)) if passed > 0 else 0.0
        families.add("CPUUtilization", (), 100 * num_cpus * busy)
        kilobytes = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
        if "MemAvailable" in kilobytes:
            most, free = (int(kilobytes[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
            families.add("MemoryUtilization", (), 100 * (1 - free / most))

    def _add_gpus(self, families: MetricFamilies) -> None:
        """Add the sums over all GPUs, as CloudWatch has them."""
        gpus = self._gpus.read()
        if gpus:
            families.add("GPUUtilization", (), sum(gpu.percent for gpu in gpus))
            families.add("GPUMemoryUtilization", (), sum(100 * gpu.used_bytes / gpu.total_bytes for gpu in gpus))
