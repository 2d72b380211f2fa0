"""Routing strategies and reasons, and the documents that list them."""

from pathlib import Path
from random import Random

import pytest

from torchmoor.config.routing import VariantSettings
from torchmoor.proxy.routing import reasons
from torchmoor.proxy.routing.strategies import STRATEGIES
from torchmoor.proxy.routing.strategy import Strategy

DOCS = Path(__file__).parents[4] / "docs"
NAMES = sorted(reasons.SENTENCES)  # including those of the strategies


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_page_lists_each_strategy(name: str) -> None:
    assert f"\n| `{name}`" in (DOCS / "routing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("strategy", STRATEGIES.values())
def test_each_strategy_is_made_from_the_settings_of_a_variant(strategy: type[Strategy]) -> None:
    made = strategy.make(VariantSettings(model="llava"), Random(1))

    assert type(made) is strategy


@pytest.mark.parametrize("name", NAMES)
def test_the_documents_list_each_reason(name: str) -> None:
    page = "many-models.md" if name.startswith("model-") else "routing.md"
    assert f"`{name}`" in (DOCS / page).read_text(encoding="utf-8")
