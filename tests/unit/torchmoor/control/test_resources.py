"""The file of the control plane's resources: a change that cannot be saved is undone, and a damaged file is refused."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import DEADLINE_S
from torchmoor.config.control import ControlSettings
from torchmoor.control.resources import FILE, Resource, Resources
from torchmoor.errors import ConfigError, LimitExceeded

ARN = "arn:aws:sagemaker:us-east-1:000000000000:model/m"
TAG = {"Key": "team", "Value": "vision"}


def add(resources: Resources) -> None:
    asyncio.run(resources.add(resources.models, "m", Resource({"ModelName": "m"}, 1.0), ARN, [TAG]))


def block(folder: Path) -> Path:
    """Make the file impossible to write, for root too."""
    blocked = (folder / FILE).with_suffix(".partial")
    blocked.mkdir()
    return blocked


def test_resources_survive_a_restart(tmp_path: Path) -> None:
    add(Resources(tmp_path, ControlSettings()))

    again = Resources(tmp_path, ControlSettings())

    assert again.models == {"m": Resource({"ModelName": "m"}, 1.0)}
    assert again.tags == {ARN: {"team": "vision"}}


def test_what_was_acknowledged_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is on the disk before it gets its name, and then the name."""
    synced: list[int] = []

    def sync(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", sync)

    add(Resources(tmp_path, ControlSettings()))

    assert synced == [(tmp_path / FILE).stat().st_ino, tmp_path.stat().st_ino]


def test_what_cannot_be_saved_has_not_happened(tmp_path: Path) -> None:
    """If saving fails, an added resource does not exist and a removed one still does, with its tags."""
    resources = Resources(tmp_path, ControlSettings())
    blocked = block(tmp_path)
    with pytest.raises(IsADirectoryError):
        add(resources)
    assert (resources.models, resources.tags) == ({}, {})

    blocked.rmdir()
    add(resources)
    blocked.mkdir()
    with pytest.raises(IsADirectoryError):
        asyncio.run(resources.remove(resources.models, "m", ARN))
    assert list(resources.models) == ["m"]
    assert resources.tags == {ARN: {"team": "vision"}}

    blocked.rmdir()
    asyncio.run(resources.remove(resources.models, "m", ARN))
    assert (resources.models, resources.tags) == ({}, {})
    assert not Resources(tmp_path, ControlSettings()).models


async def test_requests_are_answered_while_the_file_is_encoded(tmp_path: Path) -> None:
    """The event loop continues while the file is encoded, and a change meanwhile is in the next file."""

    class Large(dict[str, str]):
        def items(self) -> Any:
            is_encoding.set()
            assert goes_on.wait(DEADLINE_S), "the event loop waits for the encoder"
            return super().items()

    is_encoding, goes_on = threading.Event(), threading.Event()
    resources = Resources(tmp_path, ControlSettings())
    resources.models["m"] = Resource(Large(ModelName="m"), 1.0)
    resources.tags[ARN] = {"team": "vision"}

    saving = asyncio.create_task(resources.save())
    assert await asyncio.to_thread(is_encoding.wait, DEADLINE_S)
    resources.tags[ARN]["team"] = "audio"
    goes_on.set()
    await saving
    assert Resources(tmp_path, ControlSettings()).tags == {ARN: {"team": "vision"}}
    await resources.save()
    assert Resources(tmp_path, ControlSettings()).tags == {ARN: {"team": "audio"}}

    assert Resources(tmp_path, ControlSettings()).models == {"m": Resource({"ModelName": "m"}, 1.0)}


async def test_a_save_whose_caller_is_cancelled_comes_before_the_next(tmp_path: Path) -> None:
    """A cancelled caller's save finishes before the next one starts, since its thread cannot be stopped."""

    class Slow(dict[str, str]):
        def items(self) -> Any:
            if not is_encoding.is_set():
                is_encoding.set()
                assert goes_on.wait(DEADLINE_S)
            return super().items()

    is_encoding, goes_on = threading.Event(), threading.Event()
    resources = Resources(tmp_path, ControlSettings())
    resources.models["m"] = Resource(Slow(ModelName="m"), 1.0)

    first = asyncio.create_task(resources.save())
    assert await asyncio.to_thread(is_encoding.wait, DEADLINE_S)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    resources.models["n"] = Resource({"ModelName": "n"}, 2.0)
    second = asyncio.create_task(resources.save())
    done, _ = await asyncio.wait([second], timeout=0.05)
    goes_on.set()
    await second
    assert not done

    assert list(Resources(tmp_path, ControlSettings()).models) == ["m", "n"]


@pytest.mark.parametrize("kind", ["models", "configs", "endpoints", "targets", "policies", "alarms", "tags"])
def test_a_file_that_lacks_a_part_is_refused(tmp_path: Path, kind: str) -> None:
    """A file without one of its parts is refused; it would be written back without the part."""
    add(Resources(tmp_path, ControlSettings()))
    file = tmp_path / FILE
    content = json.loads(file.read_bytes())
    del content[kind]
    file.write_text(json.dumps(content))

    with pytest.raises(ConfigError, match="does not hold the control plane's resources"):
        Resources(tmp_path, ControlSettings())


def test_resources_have_a_bound_in_bytes(tmp_path: Path) -> None:
    """The file is written whole at each change; after a deletion, and a restart, there is room again."""
    resources = Resources(tmp_path, ControlSettings(max_resource_bytes=3000))
    large = Resource({"PrimaryContainer": {"Environment": {"a": "b" * 2000}}}, 1.0)
    asyncio.run(resources.add(resources.models, "large", large, ARN))

    again = Resources(tmp_path, ControlSettings(max_resource_bytes=3000))
    with pytest.raises(LimitExceeded, match=r"control\.max_resource_bytes allows 3000"):
        asyncio.run(again.add(again.models, "other", large, f"{ARN}2"))
    assert list(again.models) == ["large"]

    asyncio.run(again.remove(again.models, "large", ARN))
    asyncio.run(again.add(again.models, "other", large, f"{ARN}2"))
    assert list(again.models) == ["other"]


def test_resources_of_each_kind_have_a_bound(tmp_path: Path) -> None:
    """The error says which setting allows how many."""
    resources = Resources(tmp_path, ControlSettings(max_resources=1))
    resources.check_number(resources.models, "models")
    add(resources)

    with pytest.raises(LimitExceeded, match=r"There are 1 models, and control\.max_resources allows 1: delete some\."):
        resources.check_number(resources.models, "models")
    resources.check_number(resources.configs, "endpoint-configs")
