"""Replay the seeds and earlier findings of the fuzzer; `make fuzz` searches for more."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_input_breaks_no_rule(path: Path) -> None:
    """Every input obeys the rules of the module that its folder is named after."""
    import_module(f"tests.fuzz.{path.parent.name}").check(path.read_bytes())
