"""The folder of asynchronous requests that `torchmoor up` creates, and when it is deleted."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from torchmoor.async_inference.queues.queue_url import open_queue
from torchmoor.async_inference.request import AsyncRequest
from torchmoor.config.async_queue import AsyncQueueSettings
from torchmoor.run.async_folder import AsyncFolder


def use(path: Path, work: Callable[[AsyncFolder], Awaitable[None]]) -> list[str]:
    """Use a folder and return the resulting message."""
    said: list[str] = []

    async def scene() -> None:
        async with AsyncFolder(path, said.append) as folder:
            await work(folder)

    asyncio.run(scene())
    return said


def test_folder_that_nobody_used_goes(tmp_path: Path) -> None:
    """A folder whose queue was never written to is deleted."""

    async def open_only(folder: AsyncFolder) -> None:
        queue = open_queue(folder.inference.queue, AsyncQueueSettings())
        await queue.backlog("llava")
        await queue.close()

    assert use(tmp_path / "run dir" / "async", open_only) == []
    assert not (tmp_path / "run dir").exists()


def test_request_that_waits_is_kept(tmp_path: Path) -> None:
    """The folder with a waiting request is kept before there is a result, readable by this user only."""
    path = tmp_path / "run dir" / "async"

    async def submit(folder: AsyncFolder) -> None:
        queue = open_queue(folder.inference.queue, AsyncQueueSettings())
        await queue.submit(
            AsyncRequest(
                inference_id="one",
                endpoint="llava",
                output_location="file:///o",
                failure_location="file:///f",
                body=b"x",
            )
        )
        await queue.close()

    said = use(path, submit)

    assert said == [f"asynchronous requests and results stay in {path}"]
    assert path.stat().st_mode & 0o077 == 0


def test_results_and_inputs_are_kept(tmp_path: Path) -> None:
    async def put(folder: AsyncFolder) -> None:
        (folder.path / "inputs" / "mine").write_bytes(b"x")

    assert use(tmp_path / "async", put)
    assert (tmp_path / "async/inputs/mine").exists()


def test_folder_that_was_deleted_meanwhile_ends_quietly(tmp_path: Path) -> None:
    """A folder that its user or a cleanup program has deleted causes no error."""

    async def delete(folder: AsyncFolder) -> None:
        shutil.rmtree(folder.path)

    assert use(tmp_path / "run dir" / "async", delete) == []


def test_what_cannot_be_opened_as_a_queue_is_kept(tmp_path: Path) -> None:
    """The start has failed with its own reason, which another error would hide."""

    async def make(folder: AsyncFolder) -> None:
        (folder.path / "queue.db").mkdir()

    assert use(tmp_path / "async", make)
    assert (tmp_path / "async/queue.db").exists()
