"""Requirements of tests: programs, and space on the disk."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.disk import check_machine, check_space
from tests.tools import PACKAGES, require, summarize_skips

CI_SCRIPT = Path(__file__).parents[2] / ".ci" / "run"


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_programs")
def test_missing_program_skips_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)

    with pytest.raises(pytest.skip.Exception, match=r"^curl is missing \(apt-get install curl\)$"):
        require("curl")
    with pytest.raises(pytest.skip.Exception, match=r"^ip, iptables are missing \(.* iproute2 iptables\)$"):
        require("ip", "iptables")


@pytest.mark.usefixtures("no_programs")
def test_missing_program_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")

    with pytest.raises(pytest.fail.Exception, match="podman is missing"):
        require("podman")


def test_present_program_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "curl").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    require("curl")


def test_summary_counts_tests_by_missing_program() -> None:
    """Other reasons to skip are not counted."""
    curl, tools = "Skipped: curl is missing (apt-get install curl)", "ip, iptables are missing (apt-get install x y)"

    assert summarize_skips([curl, tools, curl, "Skipped: no GPU is here"]) == (
        "skipped: 2 because curl is missing, 1 because ip, iptables are missing"
    )
    assert summarize_skips(["Skipped: there is no GPU here"]) == ""


def test_ci_installs_every_program() -> None:
    script = CI_SCRIPT.read_text(encoding="utf-8")

    assert [package for package in PACKAGES.values() if f" {package}:" not in script] == []


def test_small_disk_ends_the_run_with_the_numbers(tmp_path: Path) -> None:
    check_space(tmp_path, 0, "")

    with pytest.raises(pytest.UsageError, match=rf"^{tmp_path} has \d.* [MG]iB free and the tests need 1048576.0 GiB"):
        check_space(tmp_path, 1 << 50, "")


def test_both_file_systems_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message names the folder, both sizes and what to do."""
    monkeypatch.setattr(
        "shutil.disk_usage", {Path(tempfile.gettempdir()): usage(3 << 30), tmp_path: usage(9 << 20)}.get
    )
    monkeypatch.setattr("tests.disk.SHARED_MEMORY", tmp_path)

    with pytest.raises(
        pytest.UsageError, match=rf"^{tmp_path} has 9 MiB free .* need 32 MiB there: make room, or .*size=64m"
    ):
        check_machine()


def usage(free: int) -> SimpleNamespace:
    return SimpleNamespace(free=free)
