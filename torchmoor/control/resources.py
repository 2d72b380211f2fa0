"""The control plane's resources, kept in a JSON file so that they survive a restart."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torchmoor.config.control import ControlSettings
from torchmoor.errors import ConfigError, LimitExceeded
from torchmoor.wire.disk_sync import sync_to_disk

FILE = "resources.json"
VERSION = 1


@dataclass(slots=True)
class Resource:
    """A model or an endpoint configuration. values: the input of its Create operation, without tags."""

    values: dict[str, Any]
    created: float


@dataclass(slots=True)
class EndpointResource:
    """An endpoint. config, models: copies, because the originals may be deleted.

    serial: part of its instances' names. weights, counts: of variants that UpdateEndpointWeightsAndCapacities or
    autoscaling has changed. pending: the configuration of a running update.
    """

    config_name: str
    config: dict[str, Any]
    models: dict[str, dict[str, Any]]
    serial: int
    created: float
    modified: float
    status: str = "Creating"
    failure: str = ""
    pending: str = ""
    weights: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def variants(self) -> dict[str, Mapping[str, Any]]:
        """The configuration's variants by their names."""
        return {variant["VariantName"]: variant for variant in self.config["ProductionVariants"]}

    def weight_of(self, variant: Mapping[str, Any]) -> float:
        """Return the weight of one of the configuration's variants."""
        return self.weights.get(variant["VariantName"], float(variant.get("InitialVariantWeight", 1.0)))

    def count_of(self, variant: Mapping[str, Any]) -> int:
        """Return the number of instances of one of the configuration's variants."""
        return self.counts.get(variant["VariantName"], int(variant.get("InitialInstanceCount", 1)))


class Change(NamedTuple):
    """An entry to set in one of the dicts of `Resources`. value: None removes it."""

    among: dict[str, Any]
    name: str
    value: Any

    def make(self) -> Change:
        """Make the change, and return the one that takes it back."""
        before = self.among.pop(self.name, None)
        if self.value is not None:
            self.among[self.name] = self.value
        return Change(self.among, self.name, before)


T = TypeVar("T", Resource, EndpointResource)
_KINDS: dict[str, type[Resource | EndpointResource]] = {
    "models": Resource,
    "configs": Resource,
    "endpoints": EndpointResource,
    "targets": Resource,
    "policies": Resource,
    "alarms": Resource,
}


class Resources:
    """All resources by their names, and tags by their resource's ARN."""

    def __init__(self, folder: Path, settings: ControlSettings) -> None:
        """folder: has the file, which is always rewritten as a whole.

        Raises ConfigError if the file cannot be read.
        """
        self.models: dict[str, Resource] = {}
        self.configs: dict[str, Resource] = {}
        self.endpoints: dict[str, EndpointResource] = {}
        self.tags: dict[str, dict[str, str]] = {}
        self.targets: dict[str, Resource] = {}  # scalable, by ResourceId
        self.policies: dict[str, Resource] = {}  # of scaling
        self.alarms: dict[str, Resource] = {}
        self.num_serials = 0
        self._path = folder / FILE
        self._settings = settings
        self._num_bytes = 0
        self._saving = asyncio.Lock()
        if self._path.is_file():
            self._load()

    def __bool__(self) -> bool:
        return bool(self.models or self.configs or self.endpoints)

    def _load(self) -> None:
        try:
            text = self._path.read_bytes()
            content, self._num_bytes = json.loads(text), len(text)
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']}")
            for kind, make in _KINDS.items():
                getattr(self, kind).update({name: make(**each) for name, each in content[kind].items()})
            self.tags = content["tags"]
            self.num_serials = content["num_serials"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self._path} does not hold the control plane's resources ({error}): move it away, or use another "
                "--run-dir"
            ) from error

    def next_serial(self) -> int:
        """Return a number that no endpoint has had before."""
        self.num_serials += 1
        return self.num_serials

    async def add(
        self, among: dict[str, T], name: str, resource: T, arn: str, tags: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Keep a new resource with its tags. Raises LimitExceeded; OSError without keeping it if it cannot be saved."""
        self.check_room(_values(resource))
        kept = {tag["Key"]: tag["Value"] for tag in tags}
        await self.change(Change(among, name, resource), Change(self.tags, arn, kept))

    def check_room(self, values: Any) -> None:
        """Raise LimitExceeded if there is no room for these values, too."""
        most = self._settings.max_resource_bytes
        if self._num_bytes + len(json.dumps(values)) > most:
            raise LimitExceeded(
                f"All resources take {self._num_bytes} bytes, and control.max_resource_bytes allows {most}: delete "
                "some."
            )

    def check_number(self, among: Mapping[str, object], what: str) -> None:
        """Raise LimitExceeded if one more of these resources is not allowed. what: their name in the error."""
        most = self._settings.max_resources
        if len(among) >= most:
            raise LimitExceeded(f"There are {len(among)} {what}, and control.max_resources allows {most}: delete some.")

    def forget(self, among: dict[str, T], name: str, arn: str) -> None:
        """Remove a resource and its tags; `save` writes the change to the file."""
        del among[name]
        self.tags.pop(arn, None)

    async def remove(self, among: dict[str, T], name: str, arn: str) -> None:
        """Remove a resource and its tags. Raises OSError and keeps them if that cannot be saved."""
        await self.change(Change(among, name, None), Change(self.tags, arn, None))

    async def change(self, *changes: Change) -> None:
        """Make changes to different entries, and save them. Raises OSError and takes them back if that fails."""
        undo = [each.make() for each in changes]
        try:
            await self.save()
        except OSError:
            for each in undo:
                each.make()
            raise

    async def save(self) -> None:
        """Write the file, completely or not at all. If the caller is cancelled, later saves wait for this one."""
        await asyncio.shield(self._save())

    async def finish_saving(self) -> None:
        """Wait for the saves that have begun, also those whose caller was cancelled."""
        async with self._saving:
            pass

    async def _save(self) -> None:
        async with self._saving:
            content = {  # copied as far as it is changed in place
                "version": VERSION,
                **{kind: {name: _values(each) for name, each in getattr(self, kind).items()} for kind in _KINDS},
                "tags": {arn: dict(tags) for arn, tags in self.tags.items()},
                "num_serials": self.num_serials,
            }
            self._num_bytes = await asyncio.to_thread(self._write, content)

    def _write(self, values: Mapping[str, Any]) -> int:
        """Write a file that only its owner may read, because a model's Environment may have secrets. Return its size.

        Each resource is encoded by itself, because the encoder keeps Python's lock until it returns.
        """
        content = _encode(values, depth=2).encode()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".partial")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        sync_to_disk(self._path.parent)
        return len(content)


def _encode(values: Any, depth: int) -> str:
    """Return JSON text. depth: levels of objects whose values are encoded one by one."""
    if depth == 0 or not isinstance(values, dict):
        return json.dumps(values)
    return "{" + ", ".join(f"{json.dumps(name)}: {_encode(each, depth - 1)}" for name, each in values.items()) + "}"


def _values(resource: Resource | EndpointResource) -> dict[str, Any]:
    return {each.name: getattr(resource, each.name) for each in fields(resource)}
