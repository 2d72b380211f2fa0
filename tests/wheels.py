"""Builds wheels and sdists from a copy of the checkout, which stays unchanged."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("torchmoor", "handlers", "models/tiny-llava")
FILES = (
    *("setup.py", "pyproject.toml", "MANIFEST.in", "requirements.txt", "requirements-clients.txt", "README.md"),
    *("CHANGELOG.md", "LICENSE"),
)
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
BUILD_S = 900  # a machine with much other work compiles for minutes


def copy_sources(target: Path) -> Path:
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, target)
    return target


def build(kind: str, source: Path, target: Path, **environment: str) -> Path:
    """Build a wheel or an sdist; return its path."""
    target.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(target)],
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = target.iterdir()
    return built
