"""The pages that scripts/make_reference.py writes match the code."""

from typing import Annotated

import pytest
from pydantic import BaseModel, Field

from handlers.settings.handler import HandlerSettings
from scripts.make_reference import DOCS, SECTIONS, WHOLE, make_page
from scripts.reference.settings import make_group
from torchmoor.config.settings import GROUPS
from torchmoor.container.environment import ContainerEnvironment


class Example(BaseModel):
    """Settings of an example."""

    first: int = Field(1 << 20, description="Bytes.")
    second: str = Field("", description="one | two")
    third: tuple[str, ...] = Field(("a", "b"), description="Names.")
    fourth: Annotated[int, Field(ge=1, le=9)] = Field(description="A digit.")
    derived: bool = False


@pytest.mark.parametrize("name", [*WHOLE, *SECTIONS])
def test_page_is_up_to_date(name: str) -> None:
    """After a setting, command, metric, route or module is changed, run `python scripts/make_reference.py`."""
    assert (DOCS / name).read_text() == make_page(name)


def test_every_variable_of_the_container_is_listed() -> None:
    """The table in docs/container.md has every variable."""
    page = (DOCS / "container.md").read_text()

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
    assert f"\n### `{group}`\n" in (DOCS / "configuration.md").read_text()
