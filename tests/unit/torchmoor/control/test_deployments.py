"""Changes of one endpoint happen one at a time, however many wait."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from torchmoor.config.control import ControlSettings
from torchmoor.control.deployments import Deployments
from torchmoor.control.downloads import DownloadEnded, DownloadState
from torchmoor.control.resources import EndpointResource
from torchmoor.errors import RequestInvalid
from torchmoor.proxy.instances.registry import Registry

RESOURCE = EndpointResource(
    config_name="c",
    config={"ProductionVariants": [{"VariantName": "v", "ModelName": "m", "InitialInstanceCount": 1}]},
    models={"m": {"PrimaryContainer": {"ModelDataUrl": "s3://bucket/m.mar"}}},
    serial=1,
    created=0.0,
    modified=0.0,
)


class Store:
    """Artifacts of a store that answers when the test says so, and has nothing."""

    def __init__(self) -> None:
        self.num_running = self.most_running = self.num_asked = 0
        self.asked = threading.Semaphore(0)
        self.answer = threading.Semaphore(0)
        self.downloads: list[DownloadState] = []

    def fetch(self, container: Any, name: str, folder: Path, download: Any) -> Any:
        self.downloads.append(download)
        self.num_running += 1
        self.num_asked += 1
        self.most_running = max(self.most_running, self.num_running)
        self.asked.release()
        self.answer.acquire(timeout=60)
        self.num_running -= 1
        raise RequestInvalid("There is no such object.")


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def deployments(store: Store, tmp_path: Path) -> Deployments:
    unused: Any = None
    artifacts: Any = store
    return Deployments(ControlSettings(), Registry(()), unused, artifacts, (), tmp_path)


def test_changes_happen_one_at_a_time(deployments: Deployments, store: Store) -> None:
    """Also those that come while others wait behind a deletion."""

    async def asked() -> None:
        assert await asyncio.to_thread(store.asked.acquire, timeout=60)

    async def change() -> list[Any]:
        first = asyncio.create_task(deployments.start("e", RESOURCE))
        await asked()
        stopping = asyncio.create_task(deployments.stop("e"))
        second = asyncio.create_task(deployments.start("e", RESOURCE))
        await asyncio.sleep(0)  # both wait now
        store.answer.release()
        await stopping
        await asked()
        third = asyncio.create_task(deployments.start("e", RESOURCE))
        await asyncio.sleep(0)
        await asyncio.to_thread(int)  # a third question to the store would be taken before
        await asyncio.to_thread(int)
        store.answer.release()
        await asyncio.wait([second])
        await asked()
        store.answer.release()
        return await asyncio.gather(first, second, third, return_exceptions=True)

    outcomes = asyncio.run(change())

    assert [type(each) for each in outcomes] == [RequestInvalid] * 3
    assert (store.num_asked, store.most_running) == (3, 1)


def test_an_endpoint_that_is_gone_is_not_resized(deployments: Deployments) -> None:
    """A deletion may come first."""
    asyncio.run(deployments.resize("e", {"v": 2}))

    assert deployments.count_of("e", "v") == 0


def test_progress_is_described_until_a_start_ends(deployments: Deployments, store: Store) -> None:
    """A variant says what is fetched for it; an interrupted start ends with its download, and leaves nothing."""

    async def watch() -> list[list[str]]:
        start = asyncio.create_task(deployments.start("e", RESOURCE))
        assert await asyncio.to_thread(store.asked.acquire, timeout=60)
        [download] = store.downloads
        found = [deployments.progress_of("e", "v"), deployments.progress_of("e", "other")]
        download.begin(4_000_000)
        download.count(1_000_000)
        found.append(deployments.progress_of("e", "v"))
        start.cancel()
        await asyncio.sleep(0)
        assert not start.done()  # the thread still writes
        store.answer.release()
        with pytest.raises(asyncio.CancelledError):
            await start
        with pytest.raises(DownloadEnded):
            download.count(1)
        return [*found, deployments.progress_of("e", "v")]

    assert asyncio.run(watch()) == [
        ["preparing the model"],
        [],
        ["downloading the model, 1.0 of 4.0 MB until now"],
        [],
    ]
