"""Tags of resources: AddTags, ListTags and DeleteTags."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchmoor.control.arns import CONFIG, ENDPOINT, MODEL, Arns
from torchmoor.control.listing import ListedResource, list_page
from torchmoor.control.protocol import Operation, Values
from torchmoor.control.resources import Change, Resources
from torchmoor.errors import RequestInvalid

MAX_TAGS = 50  # of a resource, as at AWS


class Tags:
    """Tags by their resource. has_endpoint: whether there is an endpoint of that name."""

    def __init__(self, resources: Resources, arns: Arns, has_endpoint: Callable[[str], bool]) -> None:
        self._resources = resources
        self._arns = arns
        self._has_endpoint = has_endpoint

    def operations(self) -> dict[str, Operation]:
        """Return the operations by their names."""
        return {"AddTags": self._add, "ListTags": self._list, "DeleteTags": self._delete}

    async def _add(self, values: Values) -> Values:
        arn = self._check(values["ResourceArn"])
        tags = {**self._resources.tags.get(arn, {}), **{tag["Key"]: tag["Value"] for tag in values["Tags"]}}
        if len(tags) > MAX_TAGS:
            raise RequestInvalid(f"A resource has {MAX_TAGS} tags at most, and these would be {len(tags)}.")
        self._resources.check_room(tags)
        await self._resources.change(Change(self._resources.tags, arn, tags))
        return {"Tags": _listed(tags)}

    def _list(self, values: Values) -> Values:
        tags = self._resources.tags.get(self._check(values["ResourceArn"]), {})
        rows = [ListedResource(tag["Key"], 0.0, summary=tag) for tag in _listed(tags)]
        order = {"SortBy": "Name", "SortOrder": "Ascending"}
        return list_page(rows, {"MaxResults": MAX_TAGS, **values, **order}, "Tags")

    async def _delete(self, values: Values) -> Values:
        arn = self._check(values["ResourceArn"])
        tags = {key: value for key, value in self._resources.tags.get(arn, {}).items() if key not in values["TagKeys"]}
        await self._resources.change(Change(self._resources.tags, arn, tags))
        return {}

    def _check(self, arn: str) -> str:
        """Return the ARN of a resource that exists. Raises RequestInvalid."""
        kind, name = self._arns.parse(arn)
        resources = self._resources
        is_there = {
            MODEL: name in resources.models,
            CONFIG: name in resources.configs,
            ENDPOINT: self._has_endpoint(name),
        }
        if not is_there[kind]:
            raise self._arns.missing(kind, name)
        return arn


def _listed(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]
