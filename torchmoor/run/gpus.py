"""The host's GPUs, and each instance's share of their memory."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile

from torchmoor.config.launcher import LaunchSettings
from torchmoor.fleet.torchserve import Launch
from torchmoor.wire.handler_variables import DEFAULT_DEVICE_FRACTION, DEVICE_FRACTION

logger = logging.getLogger(__name__)

_GPU = re.compile(r"\d+|(GPU|MIG)-\S+", re.ASCII)


def find_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs to use: those of CUDA_VISIBLE_DEVICES if it is set, else those that nvidia-smi lists.

    As CUDA does, ignore an invalid name, such as -1, and all names after it.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return list(takewhile(_GPU.fullmatch, map(str.strip, visible.split(","))))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        logger.warning("nvidia-smi does not answer; going on without a GPU")
        return []
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))]


def usable_gpus(environ: Mapping[str, str], launch: LaunchSettings) -> list[str]:
    """Return the GPUs to use, as CUDA_VISIBLE_DEVICES of each instance that can run.

    There are none, with a warning, if the installed torch is a build for the CPU.
    """
    gpus = find_gpus(environ)
    build = None if launch.python else _torch_build()
    if gpus and build is not None and build.endswith("+cpu"):
        logger.warning(
            "torch %s is built for the CPU, so the %d GPUs are not used; with them: "
            "pip install --force-reinstall torch==%s",
            build,
            len(gpus),
            build.removesuffix("+cpu"),
        )
        return []
    size = launch.gpus_per_instance
    if len(gpus) < size and size > 1:
        logger.warning(
            "gpus_per_instance is %d, and %s can be used: instances run without one",
            size,
            f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}",
        )
    return [",".join(gpus[start : start + size]) for start in range(0, len(gpus) - size + 1, size)]


def _torch_build() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def share_gpus(launches: Sequence[Launch], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that divides a GPU among its instances; nothing if the operator sets it or none is shared."""
    most = max(Counter(launch.gpu for launch in launches if launch.gpu is not None).values(), default=1)
    if most == 1 or DEVICE_FRACTION in environ:
        return {}
    return {DEVICE_FRACTION: f"{DEFAULT_DEVICE_FRACTION / most:.3f}"}
