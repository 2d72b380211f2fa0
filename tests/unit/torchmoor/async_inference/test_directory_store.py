"""Properties of objects in files: links, pipes, permissions and full disks."""

import asyncio
import errno
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.torchmoor.async_inference.objects import MIB, chunks_of, closing, read_all, repeat
from tests.waiting import DEADLINE_S
from torchmoor.async_inference.objects import directory_store
from torchmoor.async_inference.objects.directory_store import DirectoryStore
from torchmoor.async_inference.objects.object_store import (
    LocationRefused,
    ObjectConflict,
    ObjectDenied,
    ObjectMissing,
    ObjectUnavailable,
)
from torchmoor.config.objects import ObjectSettings
from torchmoor.errors import ConfigError


def opened(folder: Path) -> AbstractAsyncContextManager[DirectoryStore]:
    """Open a store of this folder, for inputs and results."""
    return closing(DirectoryStore(ObjectSettings(input_directories=(str(folder),), output_directories=(str(folder),))))


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_inputs_and_results_have_directories_of_their_own(tmp_path: Path) -> None:
    """Clients can neither read another's result as input nor have an input overwritten, as the directories differ."""
    inputs, outputs = f"{tmp_path}/in", f"{tmp_path}/out"
    store = DirectoryStore(ObjectSettings(input_directories=(inputs,), output_directories=(outputs,)))

    store.check_input(f"file://{inputs}/x")
    store.check_output(f"file://localhost{outputs}/x")
    with pytest.raises(LocationRefused, match=r"objects\.input_directories"):
        store.check_input(f"file://{outputs}/x")
    with pytest.raises(LocationRefused, match=r"objects\.output_directories"):
        store.check_output(f"file://{inputs}/x")


@pytest.mark.parametrize(
    "url", ["file://host/{}/x", "file://{}/x?y", "file://{}/%2e%2e/x", "file://{}/a%00b", "file://{}"]
)
def test_urls_that_name_no_file_below_the_directory_are_refused(tmp_path: Path, url: str) -> None:
    """A URL that leads out of the directory is refused, percent-encoded or not."""
    store = DirectoryStore(ObjectSettings(input_directories=(str(tmp_path),)))

    with pytest.raises(LocationRefused):
        store.check_input(url.format(tmp_path))


def test_a_name_that_no_file_can_have_is_refused_as_text(tmp_path: Path) -> None:
    """Otherwise a request would run, and its result would become a failure at its publication."""
    store = DirectoryStore(ObjectSettings(output_directories=(str(tmp_path),)))

    store.check_output(f"file://{tmp_path}/new/{'x' * 255}")
    for name in ("x" * 256, "%C3%A9" * 128):
        with pytest.raises(LocationRefused, match="255 bytes at most"):
            store.check_output(f"file://{tmp_path}/new/{name}/x")


async def test_a_link_that_leads_out_is_not_followed(tmp_path: Path) -> None:
    """A link out of the directory, as a file or a folder on the way, is refused for every operation."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "folder").symlink_to(secret)
    (root / "file").symlink_to(secret / "key")
    (root / "loop").symlink_to(root / "loop")

    async with opened(root) as store:
        await store.put(f"file://{root}/staged", b"mine")
        for name in ("folder/key", "file", "loop"):
            with pytest.raises(LocationRefused):
                await store.open(f"file://{root}/{name}")
        for call in (
            store.put(f"file://{root}/folder/key", b"mine"),
            store.upload(f"file://{root}/folder/new/deep", chunks_of(b"mine")),
            store.publish(f"file://{root}/staged", "tag", f"file://{root}/folder/key"),
            store.delete(f"file://{root}/folder/key"),
        ):
            with pytest.raises(LocationRefused, match="link"):
                await call
        with pytest.raises(ObjectConflict):
            await store.put(f"file://{root}/file", b"mine")

    assert files_of(secret) == ["key"]
    assert (secret / "key").read_text() == "secret"


async def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A folder is refused, and so is a pipe, which would block its reader."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()

    async with opened(tmp_path) as store:
        for name in ("pipe", "folder", "pipe/x"):
            with pytest.raises(LocationRefused):
                await store.open(f"file://{tmp_path}/{name}")
        tag = await store.upload(f"file://{tmp_path}/staged", chunks_of(b"x"))
        (tmp_path / "file").write_bytes(b"x")
        for name in ("folder", "file/x", "file/deep/x"):
            with pytest.raises(LocationRefused):
                await store.put(f"file://{tmp_path}/{name}", b"x")
            with pytest.raises(LocationRefused):
                await store.publish(f"file://{tmp_path}/staged", tag, f"file://{tmp_path}/{name}")
            assert await store.is_taken(f"file://{tmp_path}/{name}")
        assert await store.is_taken(f"file://{tmp_path}/pipe")


async def test_a_file_that_shrinks_while_it_is_read_is_no_whole_input(tmp_path: Path) -> None:
    """A file that shrinks while it is read is an error, because its size was promised."""
    (tmp_path / "x").write_bytes(b"x" * 3 * MIB)

    async with opened(tmp_path) as store, await store.open(f"file://{tmp_path}/x") as download:
        await anext(aiter(download.chunks))
        os.truncate(tmp_path / "x", 10)
        with pytest.raises(ObjectUnavailable, match="shorter"):
            async for _ in download.chunks:
                pass


async def test_a_download_that_is_closed_reads_nobody_elses_file(tmp_path: Path) -> None:
    """A read after the close fails, even if another file has the same descriptor number by then."""
    (tmp_path / "x").write_bytes(b"x" * 3)
    (tmp_path / "y").write_bytes(b"y" * 3)

    async with opened(tmp_path) as store:
        late = await store.open(f"file://{tmp_path}/x")
        await asyncio.wrap_future(late.release())
        async with await store.open(f"file://{tmp_path}/y") as other:
            with pytest.raises(ObjectUnavailable):
                await anext(aiter(late.chunks))
            assert [chunk async for chunk in other.chunks] == [b"yyy"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
async def test_a_file_without_rights_is_denied(tmp_path: Path) -> None:
    """A file without read permission is an error that is not retried."""
    (tmp_path / "x").write_bytes(b"x")
    (tmp_path / "x").chmod(0)

    async with opened(tmp_path) as store:
        with pytest.raises(ObjectDenied):
            await store.open(f"file://{tmp_path}/x")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a 4 MiB file system, or a limit on this process's file sizes if mounting is not permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if mount.returncode == 0:
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
    else:
        with _file_size_limit(4 * MIB):
            yield folder


@contextmanager
def _file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


async def test_a_full_disk_is_said_and_leaves_nothing_behind(small_disk: Path) -> None:
    """A full disk is a retryable error, and the unfinished object is deleted, so that smaller results fit."""
    async with opened(small_disk) as store:
        with pytest.raises(ObjectUnavailable, match="no room"):
            await store.upload(f"file://{small_disk}/large", repeat(b"x" * MIB, 8))
        with pytest.raises(ObjectUnavailable, match="no room"):
            await store.put(f"file://{small_disk}/large", b"x" * 8 * MIB)
        await store.put(f"file://{small_disk}/small", b"x" * MIB)
        assert len(await read_all(store, f"file://{small_disk}/small")) == MIB

    assert files_of(small_disk) == ["small"]


async def test_an_upload_that_is_cancelled_as_it_ends_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file gets its name in a thread, which a cancellation does not stop, and is removed then."""
    is_syncing, may_end, sync, loop = asyncio.Event(), threading.Event(), os.fsync, asyncio.get_running_loop()

    def sync_late(handle: int) -> None:
        loop.call_soon_threadsafe(is_syncing.set)
        assert may_end.wait(DEADLINE_S)
        sync(handle)

    async with opened(tmp_path) as store:
        monkeypatch.setattr(os, "fsync", sync_late)
        upload = asyncio.create_task(store.upload(f"file://{tmp_path}/staged", chunks_of(b"x")))
        await is_syncing.wait()
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        may_end.set()

    assert files_of(tmp_path) == []


@pytest.mark.parametrize(("owner", "name"), [(Path, "unlink"), (directory_store, "sync_to_disk")])
async def test_an_upload_that_fails_after_its_file_has_its_name_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    call, failures = getattr(owner, name), [OSError(errno.EIO, os.strerror(errno.EIO))]

    def fail_once(path: Path) -> None:
        if failures:
            assert "staged" in files_of(tmp_path)
            raise failures.pop()
        call(path)

    monkeypatch.setattr(owner, name, fail_once)
    async with opened(tmp_path) as store:
        with pytest.raises(ObjectUnavailable, match=os.strerror(errno.EIO)):
            await store.upload(f"file://{tmp_path}/staged", chunks_of(b"x"))
        assert files_of(tmp_path) == []


async def test_an_upload_replaces_no_file(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.upload(f"file://{tmp_path}/staged", chunks_of(b"first"))
        with pytest.raises(ObjectConflict):
            await store.upload(f"file://{tmp_path}/staged", chunks_of(b"second"))
        assert await read_all(store, f"file://{tmp_path}/staged") == b"first"

    assert files_of(tmp_path) == ["staged"]


async def test_two_file_systems_are_told_apart(tmp_path: Path) -> None:
    """Inputs and results on different file systems are refused, because a rename between them is not atomic."""
    if os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("/dev/shm is not a separate file system here")
    other = Path(f"/dev/shm/torchmoor-{os.getpid()}")
    settings = ObjectSettings(output_directories=(str(tmp_path), str(other)))

    try:
        async with closing(DirectoryStore(settings)) as store:
            tag = await store.upload(f"file://{tmp_path}/staged", chunks_of(b"x"))
            with pytest.raises(LocationRefused, match="one file system"):
                await store.publish(f"file://{tmp_path}/staged", tag, f"file://{other}/final")
            with pytest.raises(ObjectMissing):
                await store.publish(f"file://{tmp_path}/none", tag, f"file://{other}/final")
        assert files_of(other) == []
    finally:
        os.rmdir(other)


def test_directories_must_be_absolute() -> None:
    """A relative directory is refused, because it would depend on where the proxy was started."""
    with pytest.raises(ConfigError, match="output_directories"):
        ObjectSettings(output_directories=("results",))


def open_files() -> list[Path]:
    return [each.resolve() for each in Path("/proc/self/fd").iterdir() if each.exists()]


async def test_a_file_that_opens_after_its_reader_was_cancelled_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that opens late, after its reader was cancelled, is closed; the thread that opens it cannot be stopped."""
    (tmp_path / "input").write_bytes(b"x")
    has_begun, may_open = threading.Event(), threading.Event()
    open_now = os.open

    def open_late(path: Any, *arguments: Any, **more: Any) -> int:
        if Path(path) == tmp_path / "input":
            has_begun.set()
            assert may_open.wait(60)
        return open_now(path, *arguments, **more)

    monkeypatch.setattr(os, "open", open_late)

    async with opened(tmp_path) as store:
        opening = asyncio.create_task(store.open(f"file://{tmp_path}/input"))
        assert await asyncio.to_thread(has_begun.wait, 60)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        may_open.set()

    assert tmp_path / "input" not in open_files()
