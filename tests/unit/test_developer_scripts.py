"""Scripts for developers: the wording, a recorded run, repeated tests."""

import subprocess
from pathlib import Path

import pytest

from scripts import check_prose, repeat_tests
from scripts.record_run import record

ROOT = Path(__file__).resolve().parents[2]


def test_wording_is_checked_only_where_that_was_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """If the given files have no prose, others are not checked instead; a file outside the checkout is refused."""
    monkeypatch.setattr(check_prose, "find_habits", lambda path: [f"{path.name} is checked"])
    monkeypatch.setattr("sys.argv", ["check_prose.py", "LICENSE"])
    monkeypatch.chdir(ROOT)

    assert check_prose.main() == 0
    assert capsys.readouterr().err == ""

    for other in (tmp_path, "nothing.md"):
        monkeypatch.setattr("sys.argv", ["check_prose.py", str(other)])
        with pytest.raises(SystemExit):
            check_prose.main()
        assert "in this checkout" in capsys.readouterr().err


def test_recorded_run_has_its_last_line() -> None:
    """A recorded run includes a last line without a line end."""
    assert [text for _, text in record(["printf", "first\\nlast"])] == ["first", "last"]


def test_repeated_tests_get_the_arguments_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An expression of several words, and a temporary folder with a space, stay one argument."""
    (tmp_path / "Makefile").write_text('test:\n\t@printf "%s\\n" $(ARGS) >arguments\n')
    monkeypatch.setattr(repeat_tests, "ROOT", tmp_path)

    assert repeat_tests.run_tests(tmp_path / "a b.xml", ["-k", "one or two"]) == []

    assert (tmp_path / "arguments").read_text().splitlines() == ["-k", "one or two", f"--junitxml={tmp_path}/a b.xml"]


def test_clean_removes_all_that_git_ignores() -> None:
    """What the targets and tests build is ignored; `make clean` removes it, such as 90 MB of MiniLM."""
    ignored = (ROOT / ".gitignore").read_text().split()

    commands = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)

    removed = commands.stdout.split()
    assert [pattern for pattern in ignored if pattern.rstrip("/") not in removed] == []
