"""The table of routing reasons, and the documents that list them."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmoor.proxy.routing import reasons

DOCS = Path(__file__).parents[4] / "docs"
NAMES = sorted(value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str))


def test_each_reason_has_a_sentence() -> None:
    assert sorted(reasons.SENTENCES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_documents_list_each_reason(name: str) -> None:
    page = "many-models.md" if name.startswith("model-") else "routing.md"
    assert f"`{name}`" in (DOCS / page).read_text(encoding="utf-8")
