"""`make mutants`: what it changes, and where."""

import ast

import pytest

from scripts.run_mutants import ROOT, SUBJECTS, main, make_mutants


def test_each_change_is_one_expression_of_a_module_that_can_be_imported() -> None:
    """Comparisons, conditions, numbers and raises change; the line is the changed one's."""
    module = "torchmoor/proxy/http/eventstream.py"
    original = ast.unparse(ast.parse((ROOT / module).read_text())).splitlines()

    mutants = list(make_mutants(module))

    assert any("_OVERHEAD" in str(mutant) or "16 -> 17" in str(mutant) for mutant in mutants)
    for mutant in mutants:
        changed = ast.unparse(mutant.tree).splitlines()
        assert len(changed) == len(original)
        assert sum(one != other for one, other in zip(original, changed, strict=True)) == 1
        compile(mutant.tree, module, "exec")


@pytest.mark.parametrize("arguments", [["nothing"], ["--every", "0"]])
def test_what_does_not_exist_is_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown name, and a step of 0, are refused before any test runs."""
    monkeypatch.setattr("sys.argv", ["run_mutants.py", *arguments])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_every_subject_has_its_modules_and_tests() -> None:
    paths = [path for subject in SUBJECTS.values() for path in (*subject.modules, *subject.tests) if "/" in path]

    assert [path for path in paths if not (ROOT / path).exists()] == []
