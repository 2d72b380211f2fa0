"""Replay the seeds and earlier findings of the fuzzer; `make fuzz` searches for more."""

from importlib import import_module
from pathlib import Path

import pytest

from tests.fuzz import connections

CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted(path for path in CORPUS.glob("*/*") if path.is_file())


FAST = sorted((CORPUS / "connections").glob("fast-*"))
DECLINED = sorted((CORPUS / "connections").glob("declined-*"))


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_input_breaks_no_rule(path: Path) -> None:
    """Every input obeys the rules of the module that its folder is named after."""
    import_module(f"tests.fuzz.{path.parent.name}").check(path.read_bytes())


@pytest.mark.parametrize("has_keys", [False, True], ids=["open", "keys"])
@pytest.mark.parametrize("path", [*FAST, *DECLINED], ids=lambda path: path.name)
def test_scripts_take_the_path_that_their_name_says(path: Path, has_keys: bool) -> None:
    """Each script that compares the two paths uses the fast path, or contains what it must decline."""
    stage = connections.Stage(keeps_decisions=False, has_keys=has_keys)
    connections.play_alone(path.read_bytes(), stage)

    assert (stage.num_fast > 0) is (path in FAST)
