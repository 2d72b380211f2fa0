"""Disks that fill with results or with the queue: new requests are refused, running ones end."""

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.torchmoor.async_inference.objects import chunks_of
from tests.unit.torchmoor.async_inference.rig import Rig, until
from torchmoor.async_inference.objects.directory_store import DirectoryStore
from torchmoor.async_inference.objects.results_budget import STAGED_TTL_S, unfinished_name
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.queues.sqlite_queue import SqliteQueue
from torchmoor.async_inference.request import AsyncState
from torchmoor.async_inference.service import AsyncEndpointContext
from torchmoor.config.async_inference import AsyncEndpointSettings
from torchmoor.config.async_queue import AsyncQueueSettings
from torchmoor.errors import DiskFull
from torchmoor.metrics.backlog import AsyncMetrics
from torchmoor.metrics.invocations import InvocationMetrics

EVERYTHING = 1 << 62  # bytes; more than any disk has


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.mark.parametrize("limit", [{"max_bytes": 4096}, {"min_free_bytes": EVERYTHING}])
async def test_full_directory_refuses_new_requests_only(rig: Rig, limit: dict[str, int]) -> None:
    """A full directory refuses new requests and stores nothing of them; a client's retry gets its answer.

    Deleting makes room.
    """
    async with rig:
        roomy, full = rig.objects, rig.objects.replace(**limit)
        service = await rig.start()
        sent = rig.request("one", invocation_id="call")
        await service.submit(sent)
        await rig.until_ended(service, "one")
        (rig.folder / "results/old").write_bytes(b"x" * 8192)
        rig.objects = full
        later = await rig.start()
        await until(lambda: later.endpoints["llava"].metrics.num_result_bytes >= 8192, "the folder is measured")

        with pytest.raises(DiskFull, match=f"objects.{next(iter(limit))}") as refused:
            await later.submit(rig.request("two"))
        assert (refused.value.status, refused.value.retry_after_s) == (503, 30)
        assert await later.queue.get("two") is None
        assert (await later.submit(sent)).inference_id == "one"
        assert set(rig.results()) == {"one.out", "old"}

        rig.objects = roomy
        again = await rig.start()
        await again.submit(rig.request("two"))
        assert (await rig.until_ended(again, "two")).state is AsyncState.COMPLETED


async def test_an_endpoint_that_is_created_later_shows_how_much_the_results_take(rig: Rig) -> None:
    """Its metric does not wait for the next measurement, which may be minutes away."""
    async with rig:
        (rig.folder / "results/old").write_bytes(b"x" * 8192)
        service = await rig.start()
        await until(lambda: service.endpoints["llava"].metrics.num_result_bytes >= 8192, "the folder is measured")

        metrics = AsyncMetrics("other", {"": InvocationMetrics("other", "")}, lambda: 0)
        service.add(AsyncEndpointContext(AsyncEndpointSettings(), metrics, None, root="file:///elsewhere"))

        assert metrics.num_result_bytes >= 8192


async def test_staged_answers_that_no_request_can_need_are_swept(rig: Rig) -> None:
    """The sweep deletes old staged answers, which a stop during an outage of the queue may leave."""
    folder = rig.folder / "results/outputs/.torchmoor"
    folder.mkdir(parents=True)
    for name, age_s in (("a.1", STAGED_TTL_S + 60), ("b.1", STAGED_TTL_S - 60)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age_s,) * 2)
        shutil.copy2(folder / name, folder.parent / name)

    store = DirectoryStore(rig.objects)
    await store.sweep()
    await store.close()

    assert [path.name for path in folder.iterdir()] == ["b.1"]
    assert {path.name for path in folder.parent.iterdir() if path.is_file()} == {"a.1", "b.1"}


async def test_results_count_as_they_are_written(tmp_path: Path, rig: Rig) -> None:
    """Results count as they are written, so the budget also holds between two measurements."""
    store = DirectoryStore(rig.objects.replace(max_bytes=3000))
    folder = (tmp_path / "results").as_uri()
    assert await store.find_shortage(f"{folder}/x") is None
    await store.put(f"{folder}/a", b"x" * 1000)
    assert await store.find_shortage(f"{folder}/x") is None
    await store.put(f"{folder}/b", b"x" * 2000)
    assert await store.find_shortage(f"{folder}/x") == "objects.max_bytes"
    await store.close()


async def test_sweep_deletes_what_killed_processes_left(tmp_path: Path, rig: Rig) -> None:
    """A sweep deletes old unfinished files of killed processes; young ones, results and staged answers stay."""
    folder = tmp_path / "results/deep"
    folder.mkdir(parents=True)
    old, young = unfinished_name(), unfinished_name()
    results = ("named.part", ".named.part", "result.out")  # clients choose these names
    for name in (old, young, *results):
        (folder / name).write_bytes(b"x" * 5000)
        os.utime(folder / name, (time.time() - 8000,) * 2)
    os.utime(folder / young)

    store = DirectoryStore(rig.objects)
    num_bytes = await store.sweep()
    await store.close()
    assert num_bytes == 512 * sum(path.lstat().st_blocks for path in folder.iterdir()) > 0

    assert {path.name for path in folder.iterdir()} == {young, *results}


async def test_a_result_whose_staged_name_is_still_there_counts_once(rig: Rig) -> None:
    """The name stays while notifications are sent, which takes minutes if a webhook does not answer."""
    folder = (rig.folder / "results").as_uri()
    store = DirectoryStore(rig.objects)

    tag = await store.upload(f"{folder}/.torchmoor/one.1", chunks_of(b"x" * 5000))
    staged = await store.sweep()
    await store.publish(f"{folder}/.torchmoor/one.1", tag, f"{folder}/one.out")
    published = await store.sweep()
    await store.close()

    assert staged == published == 512 * (rig.folder / "results/one.out").lstat().st_blocks > 0


async def test_a_file_that_may_not_be_deleted_is_measured(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget must hold although another user's file in a shared directory stays."""
    folder = rig.folder / "results"
    folder.mkdir(parents=True)
    for name in (unfinished_name(), "result.out"):
        (folder / name).write_bytes(b"x" * 5000)
        os.utime(folder / name, (time.time() - 8000,) * 2)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    store = DirectoryStore(rig.objects)
    with monkeypatch.context() as denied:
        denied.setattr(Path, "unlink", refuse)
        num_bytes = await store.sweep()
    await store.close()

    assert num_bytes == 512 * sum(path.lstat().st_blocks for path in folder.iterdir())
    assert len(list(folder.iterdir())) == 2


async def test_a_store_that_closes_measures_no_further(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of a million results on a slow disk would hold up the proxy's stop for minutes."""
    (rig.folder / "results").mkdir(parents=True)
    has_begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def walk_forever(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        while True:
            loop.call_soon_threadsafe(has_begun.set)
            yield str(root), [], ["a result"]

    monkeypatch.setattr(os, "walk", walk_forever)
    store = DirectoryStore(rig.objects)
    sweeping = asyncio.create_task(store.sweep())
    await has_begun.wait()

    await store.close()

    await sweeping


async def test_service_sweeps_at_its_start(rig: Rig) -> None:
    """A service deletes unfinished files of a killed process at its start."""
    async with rig:
        left = rig.folder / "results" / unfinished_name()
        left.write_bytes(b"x")
        os.utime(left, (0, 0))
        await rig.start()
        await until(lambda: not left.exists(), "the file is deleted")


@pytest.mark.parametrize("limit", [{"max_file_bytes": 200_000}, {"min_free_bytes": EVERYTHING}])
async def test_full_queue_file_refuses_new_requests_only(rig: Rig, limit: dict[str, Any]) -> None:
    """Stored requests still run when the queue's file is full, and their end makes room."""
    async with rig:
        service = rig.make_service()
        rig.places.instances = []
        async with service:
            for number in range(2):
                await service.submit(rig.request(f"r{number}", b"x" * 60_000, invocation_id=f"call{number}"))

            limited: Queue = SqliteQueue(rig.folder / "queue.db", AsyncQueueSettings(**limit))
            with pytest.raises(DiskFull, match=f"async_queue.{next(iter(limit))}"):
                await limited.submit(rig.request("more", b"x" * 60_000))
            assert await limited.get("more") is None
            stored = await limited.submit(rig.request("r0", b"x" * 60_000, invocation_id="call0"))
            assert stored.inference_id == "r0"

            rig.places.instances = [rig.instance]
            rig.places.wake()
            for number in range(2):
                assert (await rig.until_ended(service, f"r{number}")).state is AsyncState.COMPLETED
            if "max_file_bytes" in limit:
                await limited.submit(rig.request("more", b"x" * 60_000))
            await limited.close()


async def test_free_space_is_that_of_the_disk(tmp_path: Path, rig: Rig) -> None:
    """A directory that does not exist yet is on the disk of the folder above it."""
    free = shutil.disk_usage(tmp_path).free

    store = DirectoryStore(rig.objects.replace(min_free_bytes=free // 2))
    assert await store.find_shortage((tmp_path / "results/x").as_uri()) is None
    await store.close()
