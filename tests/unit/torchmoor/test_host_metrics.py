"""The load of this machine's CPUs, memory and GPUs."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from torchmoor.metrics.host import Gpus, GpuUse, HostCollector

STAT = "cpu  10 0 10 80 0 0 0 0 0 0\ncpu0 10 0 10 80 0 0 0 0 0 0\n"
MEMINFO = "MemTotal: 100 kB\nMemAvailable: 25 kB\n"


class NVMLError(Exception):
    """The driver's error."""


class Library(ModuleType):
    """NVIDIA's library on a machine with these GPUs, each with its use and its memory in use, in percent."""

    NVMLError = NVMLError

    def __init__(self, *gpus: tuple[int, int], has_driver: bool = True) -> None:
        super().__init__("pynvml")
        self._gpus = gpus
        self.has_driver = has_driver

    def nvmlInit(self) -> None:
        self._check()

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._gpus[index]

    def nvmlDeviceGetUtilizationRates(self, gpu: Any) -> Any:
        self._check()
        return SimpleNamespace(gpu=gpu[0])

    def nvmlDeviceGetMemoryInfo(self, gpu: Any) -> Any:
        return SimpleNamespace(used=gpu[1] << 20, total=100 << 20)

    def nvmlDeviceGetUUID(self, gpu: Any) -> str:
        return f"GPU-{self._gpus.index(gpu)}"

    def _check(self) -> None:
        if not self.has_driver:
            raise NVMLError("Driver Not Loaded")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "stat").write_text(STAT)
    (tmp_path / "meminfo").write_text(MEMINFO)
    return tmp_path


def values(collector: HostCollector) -> dict[str, float]:
    return {family.name: family.samples[0].value for family in collector.collect()}


def test_time_that_a_cpu_waited_may_become_less(proc: Path) -> None:
    """The kernel's count of iowait may decrease (proc(5)), which is neither more nor less work than CPUs can do."""
    (proc / "stat").write_text("cpu  10 0 10 80 50 0 0 0 0 0\ncpu0 10 0 10 80 50 0 0 0 0 0\n")
    collector = HostCollector(proc, None)
    values(collector)

    (proc / "stat").write_text("cpu  30 0 10 80 40 0 0 0 0 0\ncpu0 30 0 10 80 40 0 0 0 0 0\n")

    assert values(collector)["CPUUtilization"] == 100.0


def test_memory_that_a_system_does_not_report_costs_only_its_metric(proc: Path) -> None:
    """Linux before 3.14, and systems that imitate its /proc, have no MemAvailable."""
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 5 kB\n")

    assert values(HostCollector(proc, None)) == {"CPUUtilization": pytest.approx(20.0)}


def test_gpus_are_summed(proc: Path) -> None:
    """GPUs are summed as in CloudWatch: 200 % are two busy GPUs."""
    assert values(HostCollector(proc, Library((90, 50), (60, 25)))) == {
        "CPUUtilization": pytest.approx(20.0),
        "MemoryUtilization": 75.0,
        "GPUUtilization": 150.0,
        "GPUMemoryUtilization": 75.0,
    }


@pytest.mark.parametrize("library", [None, Library(), Library((1, 1), has_driver=False)])
def test_a_machine_without_gpus_reports_none(proc: Path, library: ModuleType | None) -> None:
    """Without the library, a GPU or its driver the two metrics are absent."""
    assert values(HostCollector(proc, library)).keys() == {"CPUUtilization", "MemoryUtilization"}


def test_a_driver_that_fails_costs_only_the_gpus(proc: Path) -> None:
    """If the driver fails the other metrics stay, and the GPUs return with the driver."""
    library = Library((10, 10))
    collector = HostCollector(proc, library)
    values(collector)
    library.has_driver = False
    failed = values(collector)
    library.has_driver = True

    assert "GPUUtilization" not in failed
    assert values(collector)["GPUUtilization"] == 10.0


def test_each_gpu_is_read_with_its_names() -> None:
    """An instance's GPU is found by its number or its UUID."""
    assert Gpus(Library((90, 50), (60, 25))).read() == [
        GpuUse("0", "GPU-0", 90, 50 << 20, 100 << 20),
        GpuUse("1", "GPU-1", 60, 25 << 20, 100 << 20),
    ]
    assert Gpus(None).read() == Gpus(Library((1, 1), has_driver=False)).read() == []


def test_a_driver_that_fails_at_each_reading_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A failing driver is logged once, and again after it has worked in between."""
    library = Library((10, 10))
    gpus = Gpus(library)

    for has_driver in (True, False, False, True, False):
        library.has_driver = has_driver
        gpus.read()

    assert [record.message for record in caplog.records] == ["GPUs could not be measured error=Driver Not Loaded"] * 2
