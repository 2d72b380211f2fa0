"""The contract of object stores, on directories and on a real S3 server."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.memory import PeakMemory, memory_of
from tests.servers import BUCKET, S3Server
from tests.unit.torchmoor.async_inference.objects import MIB, chunks_of, closing, read_all, repeat
from torchmoor.async_inference.objects.object_store import (
    LocationRefused,
    ObjectConflict,
    ObjectMetadata,
    ObjectMissing,
    ObjectTooLarge,
)
from torchmoor.async_inference.objects.scheme_store import SchemeStore
from torchmoor.config.objects import ObjectSettings

LARGE = 20 * MIB  # several parts
MAX_BYTES = LARGE + 4 * MIB


class Place:
    """A kind of store and the place in it where a test may write."""

    def __init__(self, url: str, settings: ObjectSettings, list_all: Callable[[], list[str]]) -> None:
        self.url = url
        self.list_all = list_all  # names below the place, unfinished uploads too
        self.settings = settings

    def opened(self) -> AbstractAsyncContextManager[SchemeStore]:
        """Open a store."""
        return closing(SchemeStore(self.settings))


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    limits = {"max_input_bytes": MAX_BYTES, "max_output_bytes": MAX_BYTES}
    if request.param == "file":
        folder = str(tmp_path)
        settings = ObjectSettings(input_directories=(folder,), output_directories=(folder,), **limits)
        yield Place(f"file://{folder}", settings, lambda: sorted(p.name for p in tmp_path.rglob("*") if p.is_file()))
        return
    server: S3Server = request.getfixturevalue("s3_server")
    server.use_in(monkeypatch)
    prefix = f"objects/{tmp_path.name}/"

    def list_all() -> list[str]:
        client = server.client()
        objects = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        uploads = client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])
        return sorted(item["Key"].rpartition("/")[2] for item in [*objects, *uploads])

    yield Place(f"s3://{BUCKET}/{prefix}".rstrip("/"), ObjectSettings(**limits), list_all)


@pytest.mark.parametrize("size", [0, 1, 5 * MIB + 1, 8 * MIB, LARGE + 7])
async def test_what_was_uploaded_is_read_again(place: Place, size: int) -> None:
    """An object of any size is read as uploaded, however its chunks divide into parts."""
    data = bytes(range(251)) * (size // 251 + 1)
    data = data[:size]

    async with place.opened() as store:
        pieces = [data[at : at + 700_001] for at in range(0, size, 700_001)]
        await store.upload(f"{place.url}/a/b c", chunks_of(*pieces), ObjectMetadata("text/x-test"))
        assert await read_all(store, f"{place.url}/a/b c") == data

    assert place.list_all() == ["b c"]


async def test_a_small_object_is_put_again_and_deleted_again(place: Place) -> None:
    url = f"{place.url}/small"

    async with place.opened() as store:
        await store.put(url, b"one", ObjectMetadata("text/plain"))
        await store.put(url, b"one", ObjectMetadata("text/plain"))
        assert await read_all(store, url) == b"one"
        await store.delete(url)
        await store.delete(url)
        with pytest.raises(ObjectMissing):
            await store.open(url)

    assert place.list_all() == []


async def test_publishing_may_be_repeated(place: Place) -> None:
    """A second worker that publishes the same result succeeds, also after the first has removed the staged name."""
    staged, final = f"{place.url}/.torchmoor/id.1", f"{place.url}/deep/id.out"

    async with place.opened() as store:
        tag = await store.upload(staged, repeat(b"x" * MIB, 20), ObjectMetadata("text/plain"))
        await store.publish(staged, tag, final)
        await store.publish(staged, tag, final)
        await store.delete(staged)
        await store.publish(staged, tag, final)
        assert await read_all(store, final) == b"x" * LARGE

    assert place.list_all() == ["id.out"]


async def test_all_objects_of_a_prefix_are_deleted(place: Place) -> None:
    """Objects with other beginnings stay, and a prefix or a folder without objects is not an error."""
    async with place.opened() as store:
        for name in ("id.1", "id.22", "idx.1", "other.1"):
            await store.upload(f"{place.url}/.torchmoor/{name}", chunks_of(b"answer"))
        for prefix in (".torchmoor/id.", ".torchmoor/none.", "new/id."):
            await store.delete_all(f"{place.url}/{prefix}")

    assert place.list_all() == ["idx.1", "other.1"]


@pytest.mark.parametrize("is_staged_gone", [False, True])
async def test_publishing_replaces_no_other_object(place: Place, is_staged_gone: bool) -> None:
    """Publishing over another request's object is a conflict, even if the bytes are the same."""
    staged, final = f"{place.url}/.torchmoor/id.1", f"{place.url}/id.out"

    async with place.opened() as store:
        await store.put(final, b"answer")
        tag = await store.upload(staged, chunks_of(b"answer"))
        if is_staged_gone:
            await store.delete(staged)
        with pytest.raises(ObjectConflict, match=r"id\.out is taken"):
            await store.publish(staged, tag, final)
        assert await read_all(store, final) == b"answer"

    assert place.list_all() == (["id.out"] if is_staged_gone else ["id.1", "id.out"])


async def test_writing_replaces_no_other_object(place: Place) -> None:
    """Writing does not replace an existing object, and leaves no part of the new one."""
    url = f"{place.url}/id.out"

    async with place.opened() as store:
        await store.put(url, b"first")
        for other in (b"other", b"longer", b""):
            with pytest.raises(ObjectConflict, match=r"id\.out is taken"):
                await store.put(url, other)
        assert await read_all(store, url) == b"first"

    assert place.list_all() == ["id.out"]


async def test_taken_names_are_known(place: Place) -> None:
    """A name that is taken is known, so that a submit can be refused before its request runs."""
    async with place.opened() as store:
        await store.put(f"{place.url}/deep/id.out", b"x")
        assert await store.is_taken(f"{place.url}/deep/id.out")
        assert not await store.is_taken(f"{place.url}/deep/id.ou")
        assert not await store.is_taken(f"{place.url}/new/deeper/id.out")


async def test_publishing_what_was_never_staged_is_an_error(place: Place) -> None:
    """Publishing an object that was never staged is an error, because a result would be lost silently."""
    async with place.opened() as store:
        with pytest.raises(ObjectMissing, match="neither"):
            await store.publish(f"{place.url}/.torchmoor/id.1", "tag", f"{place.url}/id.out")


async def test_several_workers_publish_at_once(place: Place) -> None:
    """Concurrent workers that publish one result all succeed, and the object is whole."""
    staged, final = f"{place.url}/.torchmoor/id.1", f"{place.url}/id.out"

    async with place.opened() as store:
        tag = await store.upload(staged, chunks_of(b"answer"))
        await asyncio.gather(*(store.publish(staged, tag, final) for _ in range(5)))
        await store.delete(staged)
        assert await read_all(store, final) == b"answer"

    assert place.list_all() == ["id.out"]


async def test_chunks_that_fail_leave_nothing_behind(place: Place) -> None:
    """If an instance dies during its answer, neither an object nor an unfinished upload remains."""

    async def broken() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * MIB
        raise ConnectionError("the instance is gone")

    async with place.opened() as store:
        with pytest.raises(ConnectionError):
            await store.upload(f"{place.url}/id", broken())

    assert place.list_all() == []


async def test_a_cancelled_upload_leaves_nothing_behind(place: Place) -> None:
    async def endless(is_well_on: asyncio.Event) -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * MIB
        is_well_on.set()
        await asyncio.Event().wait()

    async with place.opened() as store:
        is_well_on = asyncio.Event()
        upload = asyncio.create_task(store.upload(f"{place.url}/id", endless(is_well_on)))
        await is_well_on.wait()
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload

    assert place.list_all() == []


async def test_an_answer_above_the_limit_is_refused(place: Place) -> None:
    """An answer above the limit is refused as soon as the limit is passed, and nothing is stored."""
    async with place.opened() as store:
        with pytest.raises(ObjectTooLarge, match=str(MAX_BYTES)):
            await store.upload(f"{place.url}/id", repeat(b"x" * MIB, MAX_BYTES // MIB + 1))

    assert place.list_all() == []


async def test_a_small_object_above_the_limit_is_refused(place: Place) -> None:
    """A limit below the longest answer that is kept in memory applies to it, too, in every store."""
    place.settings = place.settings.replace(max_output_bytes=100)

    async with place.opened() as store:
        await store.put(f"{place.url}/fits", b"x" * 100)
        with pytest.raises(ObjectTooLarge, match="more than 100 bytes"):
            await store.put(f"{place.url}/id", b"x" * 101)

    assert place.list_all() == ["fits"]


async def test_an_input_above_the_limit_is_refused_unread(place: Place) -> None:
    url = f"{place.url}/in"
    async with place.opened() as store:
        await store.upload(url, repeat(b"x" * MIB, 6))
    place.settings = place.settings.replace(max_input_bytes=6 * MIB - 1)

    async with place.opened() as store:
        with pytest.raises(ObjectTooLarge, match=str(6 * MIB - 1)):
            await store.open(url)


async def test_memory_stays_bounded(place: Place) -> None:
    """Uploads and downloads of an object much larger than the allowed memory stay within it."""
    url = f"{place.url}/large"
    chunk = b"x" * MIB
    place.settings = place.settings.replace(max_input_bytes=80 * MIB, max_output_bytes=80 * MIB)

    async with place.opened() as store:
        await store.upload(f"{url}-before", repeat(chunk, 16))  # memory that is needed once is already allocated
        before = memory_of(os.getpid())
        with PeakMemory(os.getpid()) as peak:
            await store.upload(url, repeat(chunk, 80))
            async with await store.open(url) as download:
                num_bytes = sum([len(piece) async for piece in download.chunks])
        assert num_bytes == 80 * MIB
        assert peak.most - (before.private + before.mapped) <= 48 * MIB


async def test_a_download_that_is_given_up_holds_nothing(place: Place) -> None:
    """A download that is abandoned before, during or between reads releases its resources."""
    url = f"{place.url}/in"

    async with place.opened() as store:
        await store.upload(url, repeat(b"x" * MIB, 20))
        async with await store.open(url):
            pass
        async with await store.open(url) as download:
            await anext(aiter(download.chunks))
        async with await store.open(url) as download:
            reading = asyncio.ensure_future(anext(aiter(download.chunks)))
            await asyncio.sleep(0)
            reading.cancel()
        await asyncio.wait([reading])
        assert len(await read_all(store, url)) == LARGE


@pytest.mark.parametrize("path", ["/../x", "/a/../../x", "/./x", "/x\n"])
async def test_a_path_that_leads_elsewhere_is_refused(place: Place, path: str) -> None:
    """A path out of the place is refused by its text, because stores disagree on its meaning."""
    async with place.opened() as store:
        for check in (store.check_input, store.check_output):
            with pytest.raises(LocationRefused):
                check(place.url + path)


@pytest.mark.parametrize("url", ["ftp://host/x", "http://host/x", "/tmp/x", "s3:/b/k", "", "S3://b/k"])
def test_other_schemes_are_refused(url: str) -> None:
    """The error for another scheme lists the accepted ones."""
    store = SchemeStore(ObjectSettings())

    with pytest.raises(LocationRefused, match="s3://"):
        store.check_input(url)
    with pytest.raises(LocationRefused, match="s3://"):
        store.check_output(url)
