"""The wheel whose common path is compiled (docs/decisions/0062-compiled-wheel.md): it behaves as the source does."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.wheels import ROOT, build, copy_sources

# Links to these suffice; tests and pyproject.toml are copied, because pytest finds the packages from where they are.
LINKED = ("benchmarks", "deploy", "docs", "examples", "handlers", "model_store", "models", "scripts")
TESTS = (
    "tests/proxy",
    "--ignore=tests/proxy/test_compiled_wheel.py",
    "-q",
    "-n",
    "2",
    "-p",
    "no:cacheprovider",
    "-m",
    "not slow and not browser and not interpreted",
)


def compiled_paths() -> list[str]:
    """Return the modules that setup.py compiles."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    [value] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "COMPILED"
    ]
    compiled = eval(compile(ast.Expression(value), "setup.py", "eval"))
    return [f"{folder}/{name}.py" for folder, names in compiled.items() for name in names]


def test_no_other_module_has_a_subclass_of_a_compiled_class() -> None:
    """Python refuses to make an instance of such a class."""
    paths = compiled_paths()
    compiled = {
        node.name
        for path in paths
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.ClassDef) and not any(is_named(base, "Protocol") for base in node.bases)
    }
    others = [path for path in (ROOT / "torchmoor").rglob("*.py") if str(path.relative_to(ROOT)) not in paths]

    found = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in others
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(is_named(base, *compiled) for base in node.bases)
    ]

    assert compiled
    assert found == []


def is_named(base: ast.expr, *names: str) -> bool:
    if isinstance(base, ast.Subscript):
        base = base.value
    return isinstance(base, ast.Name) and base.id in names


@pytest.mark.slow
@pytest.mark.timeout(2700)
@pytest.mark.needs("g++")
def test_compiled_proxy_passes_the_proxys_tests(tmp_path: Path) -> None:
    """Both builds of the same source pass the same tests over sockets, except those that replace parts of the proxy."""
    wheel = build("wheel", copy_sources(tmp_path / "source"), tmp_path / "dist", TORCHMOOR_COMPILED="1")
    tree = tmp_path / "tree"
    with zipfile.ZipFile(wheel) as bundle:
        bundle.extractall(tree)
    for name in LINKED:
        (tree / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    run = {"cwd": tree, "env": {**os.environ, "PYTHONPATH": str(tree)}, "capture_output": True, "text": True}

    where = subprocess.run(
        [sys.executable, "-P", "-c", "import torchmoor.proxy.http.exchange as it; print(it.__file__)"],
        **run,
        timeout=60,
    )
    tests = subprocess.run([sys.executable, "-P", "-m", "pytest", *TESTS], **run, timeout=1500)

    assert where.stdout.strip().endswith(".so"), where.stdout + where.stderr
    assert tests.returncode == 0, tests.stdout[-20_000:]
