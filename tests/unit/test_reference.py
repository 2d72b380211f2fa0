"""docs/configuration.md matches the settings classes."""

from typing import Annotated

import pytest
from pydantic import BaseModel, Field

from handlers.settings.handler import HandlerSettings
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


class Example(BaseModel):
    """Settings of an example."""

    first: int = Field(1 << 20, description="Bytes.")
    second: str = Field("", description="one | two")
    third: tuple[str, ...] = Field(("a", "b"), description="Names.")
    fourth: Annotated[int, Field(ge=1, le=9)] = Field(description="A digit.")
    derived: bool = False


def test_page_is_up_to_date() -> None:
    """After a setting is added, changed or removed, run `python scripts/make_reference.py`."""
    assert PAGE.read_text() == make_page()


def test_metrics_are_up_to_date() -> None:
    """The table in docs/metrics.md matches admin/collectors.py."""
    assert METRICS_PAGE.read_text() == make_metrics_page()


def test_containers_variables_are_up_to_date() -> None:
    """The table in docs/container.md has every variable with its default."""
    page = CONTAINER_PAGE.read_text()

    assert page == make_container_page()
    assert all(f"`{field.alias}`" in page for field in ContainerEnvironment.model_fields.values() if field.alias)


def test_group_is_a_table() -> None:
    """A group's table has a row for each key: its default, its description and its range.

    A field without a description follows from other keys.
    """
    _, _, rows = make_group("example", Example).partition("|---|---|---|\n")

    assert rows.splitlines() == [
        "| `first` | `1048576 (1 MiB)` | Bytes. |",
        r'| `second` | `""` | one \| two |',
        "| `third` | `[a, b]` | Names. |",
        "| `fourth` | must be given | A digit. Allowed: from 1 to 9. |",
    ]


@pytest.mark.parametrize("group", [*GROUPS, *(f"handler.{name}" for name in HandlerSettings.model_fields)])
def test_every_group_has_a_section(group: str) -> None:
    assert f"\n### `{group}`\n" in PAGE.read_text()
