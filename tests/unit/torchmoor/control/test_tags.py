"""Tags of created resources."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from torchmoor.control.arns import MODEL, Arns
from torchmoor.control.resources import Resource, Resources
from torchmoor.control.tags import MAX_TAGS, Tags


def test_one_page_has_all_tags_of_a_resource(tmp_path: Path) -> None:
    """The smallest page that AWS's clients may ask for has 50, as many as a resource may have."""
    resources, names = Resources(tmp_path, 1 << 20), Arns("us-east-1", "123456789012")
    tags: Any = Tags(resources, names, lambda name: False).operations()
    arn = names.arn(MODEL, "m")
    given = [{"Key": f"key-{number:02}", "Value": "x"} for number in range(MAX_TAGS)]

    asyncio.run(resources.add(resources.models, "m", Resource({}, 0.0), arn, given))

    assert tags["ListTags"]({"ResourceArn": arn}) == {"Tags": given}
