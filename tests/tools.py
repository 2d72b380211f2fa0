"""Skip tests that need what this machine lacks, with the reason; with CI=true, fail them.

A test names the programs that it starts and that a bare Debian lacks: `@pytest.mark.needs("curl")`. A fixture or a
helper that starts one calls `require("curl")`. Programs of Debian's essential packages (bash, tar, mount, unshare)
and of this Python's packages need neither.
"""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import pytest

VLLM_PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
PACKAGES = {  # the Debian package of each program
    "buildah": "buildah",
    "chromium-headless-shell": "chromium-headless-shell",
    "crun": "crun",
    "curl": "curl",
    "dnsmasq": "dnsmasq-base",
    "docker-compose": "docker-compose",
    "docker-registry": "docker-registry",
    "g++": "g++",
    "ip": "iproute2",
    "ip6tables": "iptables",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
    "nginx": "nginx",
    "openssl": "openssl",
    "podman": "podman",
    "redis-cli": "redis-tools",
    "wrk": "wrk",
}
REASON = re.compile(r"(\S+(?:, \S+)*) (?:is|are) missing \(apt-get install [^)]+\)")


def require(*programs: str) -> None:
    """Skip the test unless all these programs are on the PATH."""
    absent = [program for program in programs if shutil.which(program) is None]
    if absent:
        packages = dict.fromkeys(PACKAGES[program] for program in absent)
        names = ", ".join(absent)
        missing(f"{names} {_verb(names)} missing (apt-get install {' '.join(packages)})")


def missing(reason: str) -> NoReturn:
    """Report that a test's requirement is missing: fail in CI, skip elsewhere."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def require_mount_namespace(*options: str) -> None:
    """Skip the test if `unshare --mount` with these options fails, in CI too: no package helps there."""
    refusal = subprocess.run(["unshare", "--mount", *options, "true"], capture_output=True, text=True, timeout=30)
    if refusal.returncode != 0:
        pytest.skip(f"this kernel allows no mount namespaces: {refusal.stderr.strip()}")


def require_vllm() -> Path:
    """Return the Python that has vLLM; skip the test without it, in CI too, which does not install its 3.5 GB."""
    if not VLLM_PYTHON.exists():
        pytest.skip("vLLM is not installed; run make setup-vllm")
    return VLLM_PYTHON


def summarize_skips(reasons: Iterable[str]) -> str:
    """Count the tests that were skipped because of a missing program, in one line; empty if there is none."""
    counts = Counter(found[1] for reason in reasons if (found := REASON.search(reason)))
    parts = (f"{number} because {names} {_verb(names)} missing" for names, number in counts.most_common())
    return f"skipped: {', '.join(parts)}" if counts else ""


def _verb(names: str) -> str:
    return "are" if "," in names else "is"
