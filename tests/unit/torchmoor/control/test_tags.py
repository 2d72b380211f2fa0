"""Tags of created resources."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from torchmoor.config.control import ControlSettings
from torchmoor.control.arns import MODEL, Arns
from torchmoor.control.resources import FILE, Resource, Resources
from torchmoor.control.tags import MAX_TAGS, Tags


async def test_one_page_has_all_tags_of_a_resource(tmp_path: Path) -> None:
    """The smallest page that AWS's clients may ask for has 50, as many as a resource may have."""
    resources, names = Resources(tmp_path, ControlSettings()), Arns("us-east-1", "123456789012")
    tags: Any = Tags(resources, names, lambda name: False).operations()
    arn = names.arn(MODEL, "m")
    given = [{"Key": f"key-{number:02}", "Value": "x"} for number in range(MAX_TAGS)]

    await resources.add(resources.models, "m", Resource({}, 0.0), arn, given)

    assert tags["ListTags"]({"ResourceArn": arn}) == {"Tags": given}


@pytest.mark.parametrize(
    ("operation", "values"),
    [("AddTags", {"Tags": [{"Key": "b", "Value": "2"}]}), ("DeleteTags", {"TagKeys": ["a"]})],
)
def test_tags_that_cannot_be_saved_are_as_before(tmp_path: Path, operation: str, values: dict[str, Any]) -> None:
    """The answer says so; a restart would have the old ones."""
    resources, names = Resources(tmp_path, ControlSettings()), Arns("us-east-1", "123456789012")
    tags: Any = Tags(resources, names, lambda name: False).operations()
    arn = names.arn(MODEL, "m")
    asyncio.run(resources.add(resources.models, "m", Resource({}, 0.0), arn, [{"Key": "a", "Value": "1"}]))
    (tmp_path / FILE).with_suffix(".partial").mkdir()

    with pytest.raises(IsADirectoryError):
        asyncio.run(tags[operation]({"ResourceArn": arn, **values}))

    assert tags["ListTags"]({"ResourceArn": arn}) == {"Tags": [{"Key": "a", "Value": "1"}]}
