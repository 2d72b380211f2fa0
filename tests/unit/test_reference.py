"""docs/configuration.md says what the settings classes say."""

from dataclasses import dataclass, fields

import pytest

from handlers.settings import HandlerSettings
from scripts.make_reference import (
    CONTAINER_PAGE,
    METRICS_PAGE,
    PAGE,
    make_container_page,
    make_group,
    make_metrics_page,
    make_page,
)
from torchmoor.config.settings import GROUPS
from torchmoor.container.environment import ContainerEnvironment


@dataclass
class Example:
    """Of an example."""

    # above
    first: int = 1 << 20
    second: str = ""  # behind
    # and below
    third: tuple[str, ...] = ("a", "b")
    fourth: tuple[str, ...] = (
        # inside a | bracket
    )


def test_page_is_up_to_date() -> None:
    """A setting that is added, changed or removed needs `python scripts/make_reference.py`."""
    assert PAGE.read_text() == make_page()


def test_metrics_are_up_to_date() -> None:
    """The table in docs/runtime-api.md says what metrics/table.py says."""
    assert METRICS_PAGE.read_text() == make_metrics_page()


def test_containers_variables_are_up_to_date() -> None:
    """The table in docs/container.md has every variable with its default."""
    page = CONTAINER_PAGE.read_text()

    assert page == make_container_page()
    assert all(f"`{field.alias}`" in page for field in ContainerEnvironment.model_fields.values() if field.alias)


def test_comments_are_found_wherever_they_stand() -> None:
    """Above a field, behind it, below it where they go on, and inside its brackets."""
    _, _, rows = make_group("example", Example).partition("|---|---|---|\n")

    assert rows.splitlines() == [
        "| `first` | `1048576 (1 MiB)` | above |",
        '| `second` | `""` | behind and below |',
        "| `third` | `[a, b]` | |",
        r"| `fourth` | `[]` | inside a \| bracket |",
    ]


@pytest.mark.parametrize("group", [*GROUPS, *(f"handler.{field.name}" for field in fields(HandlerSettings))])
def test_every_group_has_a_section(group: str) -> None:
    """Whoever looks for a group of settings finds it by its name."""
    assert f"\n### `{group}`\n" in PAGE.read_text()
