"""Properties of objects in S3: servers that are down, slow or lossy, permissions, names."""

import asyncio
import socket
import threading
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.servers import BUCKET, ForwardingProxy, LossyProxy, S3Server, free_ports, run_silent_server
from tests.unit.torchmoor.async_inference.objects import MIB, chunks_of, closing, read_all, repeat
from tests.waiting import DEADLINE_S
from torchmoor.async_inference.objects import s3_client, s3_store
from torchmoor.async_inference.objects.object_store import (
    LocationRefused,
    ObjectDenied,
    ObjectMetadata,
    ObjectMissing,
    ObjectUnavailable,
)
from torchmoor.async_inference.objects.s3_store import S3Store
from torchmoor.config.objects import ObjectSettings
from torchmoor.errors import ConfigError

pytestmark = pytest.mark.s3


@pytest.fixture(autouse=True)
def server(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Return the server that all tests of S3 share, named by the environment."""
    s3_server.use_in(monkeypatch)
    return s3_server


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"s3://{BUCKET}/objects/{tmp_path.name}"


def opened(**settings: Any) -> AbstractAsyncContextManager[S3Store]:
    return closing(S3Store(ObjectSettings(**settings)))


async def test_publishing_keeps_the_content_type(place: str) -> None:
    async with opened() as store:
        tag = await store.upload(f"{place}/staged", repeat(b"x" * MIB, 9), ObjectMetadata("text/x-test"))
        await store.publish(f"{place}/staged", tag, f"{place}/final")
        async with await store.open(f"{place}/final") as download:
            assert download.metadata.content_type == "text/x-test"


@pytest.mark.parametrize("name", ["a b", "a%20b", "a?b#c", "a+b=c&d", "ä"])
async def test_keys_are_taken_as_they_are(place: str, name: str) -> None:
    """Keys in S3 URLs are used without unquoting."""
    async with opened() as store:
        tag = await store.upload(f"{place}/staged", chunks_of(name.encode()))
        await store.publish(f"{place}/staged", tag, f"{place}/{name}")
        assert await read_all(store, f"{place}/{name}") == name.encode()


async def test_a_server_that_is_down_is_a_reason_to_try_later(place: str) -> None:
    """Every operation on a server that is down gives a retryable error."""
    down = f"http://127.0.0.1:{free_ports(1)[0]}"

    async with opened(s3_endpoint_url=down, max_attempts=1) as store:
        for call in (
            store.open(f"{place}/x"),
            store.put(f"{place}/x", b"x"),
            store.upload(f"{place}/x", repeat(b"x" * MIB, 9)),
            store.publish(f"{place}/x", "tag", f"{place}/y"),
            store.is_taken(f"{place}/x"),
            store.delete(f"{place}/x"),
        ):
            with pytest.raises(ObjectUnavailable) as told:
                await call
            assert not told.value.is_permanent


async def test_a_server_that_never_answers_costs_the_time_out(place: str) -> None:
    with run_silent_server() as port:
        async with opened(s3_endpoint_url=f"http://127.0.0.1:{port}", read_timeout_s=0.2, max_attempts=2) as store:
            with pytest.raises(ObjectUnavailable, match="reached"):
                await store.open(f"{place}/x")


class SlowProxy(ForwardingProxy):
    """A proxy that forwards answers in small pieces, and at most a fixed number of bytes of each."""

    max_answer_bytes = 1 << 40
    is_silent_then = False  # or closes the connection
    num_connections = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.has_fallen_silent = threading.Event()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        if is_answer:  # not in both threads of a connection: one would overwrite the other's count
            self.num_connections += 1
        num_left = self.max_answer_bytes if is_answer else 1 << 40
        with source, suppress(OSError):
            while num_left > 0 and (data := source.recv(min(num_left, 1 << 12 if is_answer else 1 << 16))):
                if is_answer:
                    num_left -= len(data)
                sink.sendall(data)
            if num_left <= 0 and self.is_silent_then:
                self.has_fallen_silent.set()
                sink.recv(1)  # returns when the client has gone
            sink.shutdown(socket.SHUT_RDWR)


async def test_a_slow_server_is_waited_for(place: str, server: S3Server) -> None:
    """A slow download continues as long as bytes arrive, however long it takes in total."""

    with SlowProxy(server.port) as proxy:
        async with opened(s3_endpoint_url=f"http://127.0.0.1:{proxy.port}", read_timeout_s=20) as store:
            await store.upload(f"{place}/x", repeat(b"x" * MIB, 9))
            assert len(await read_all(store, f"{place}/x")) == 9 * MIB


async def test_a_download_goes_on_where_its_connection_stopped(place: str, server: S3Server) -> None:
    """A download whose connection breaks continues at that byte."""
    async with opened() as store:
        await store.upload(f"{place}/x", chunks_of(bytes(range(256)) * 4 * 1024 * 5))

    with SlowProxy(server.port) as proxy:
        proxy.max_answer_bytes = 2 * MIB
        async with opened(s3_endpoint_url=f"http://127.0.0.1:{proxy.port}") as store:
            assert await read_all(store, f"{place}/x") == bytes(range(256)) * 4 * 1024 * 5
        assert proxy.num_connections >= 3


async def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(place: str, server: S3Server) -> None:
    """If the object is replaced during a download, the download fails instead of mixing two objects."""
    async with opened() as store:
        await store.upload(f"{place}/x", repeat(b"a" * MIB, 5))

    with SlowProxy(server.port) as proxy:
        proxy.max_answer_bytes = 2 * MIB
        url = f"http://127.0.0.1:{proxy.port}"
        async with opened(s3_endpoint_url=url) as store, await store.open(f"{place}/x") as download:
            chunks = aiter(download.chunks)
            await anext(chunks)
            await store.upload(f"{place}/x", repeat(b"b" * MIB, 5))
            with pytest.raises(ObjectUnavailable, match="replaced"):
                async for _ in chunks:
                    pass


async def test_giving_up_a_download_wakes_the_thread_that_waits(place: str, server: S3Server) -> None:
    """Closing a download wakes its waiting thread, which would otherwise stay busy for the rest of the time-out."""
    async with opened() as store:
        await store.upload(f"{place}/x", repeat(b"a" * MIB, 9))

    with SlowProxy(server.port) as proxy:
        proxy.max_answer_bytes = 2 * MIB
        proxy.is_silent_then = True
        # the test has less time than read_timeout_s
        async with opened(s3_endpoint_url=f"http://127.0.0.1:{proxy.port}", read_timeout_s=100_000) as store:
            async with await store.open(f"{place}/x") as download:
                reading = asyncio.ensure_future(_drain(download.chunks))
                assert await asyncio.to_thread(proxy.has_fallen_silent.wait, DEADLINE_S)
                assert not reading.done()
            with pytest.raises(ObjectUnavailable):
                await reading


async def _drain(chunks: Any) -> None:
    async for _ in chunks:
        pass


@pytest.mark.parametrize("size", [100, 9 * MIB])
async def test_answers_that_are_lost_do_no_harm(place: str, server: S3Server, size: int) -> None:
    """After a lost answer, an upload of a part, its completion or a publication is repeated or found done."""

    with LossyProxy(server.port) as proxy:
        async with opened(s3_endpoint_url=f"http://127.0.0.1:{proxy.port}", max_attempts=4) as store:
            for number in range(5):
                timer = threading.Timer(0.02 * number, proxy.is_losing.set)
                timer.start()
                tag = await store.upload(f"{place}/staged", chunks_of(b"x" * size))
                await store.publish(f"{place}/staged", tag, f"{place}/final{number}")
                await store.put(f"{place}/small{number}", b"x" * 100)
                timer.join()
                assert await read_all(store, f"{place}/final{number}") == b"x" * size
                assert await read_all(store, f"{place}/small{number}") == b"x" * 100
        assert proxy.num_lost > 0


@pytest.mark.parametrize("size", [100, 9 * MIB])
async def test_an_upload_that_is_cancelled_as_it_ends_leaves_no_object(
    place: str, server: S3Server, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that creates the object may be on its way; the object is removed once it is there."""
    is_last_sent, may_end = asyncio.Event(), threading.Event()

    def make_slow_client(settings: ObjectSettings) -> Any:
        client = s3_client.make_client(settings)

        def hold(**call: Any) -> None:
            loop.call_soon_threadsafe(is_last_sent.set)
            assert may_end.wait(DEADLINE_S)

        for operation in ("PutObject", "CompleteMultipartUpload"):
            client.meta.events.register(f"before-call.s3.{operation}", hold)
        return client

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(s3_store, "make_client", make_slow_client)
    async with opened() as store:
        upload = asyncio.create_task(store.upload(f"{place}/staged", chunks_of(b"x" * size)))
        await is_last_sent.wait()
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        may_end.set()

    bucket, _, key = place.removeprefix("s3://").partition("/")
    assert "Contents" not in server.client().list_objects_v2(Bucket=bucket, Prefix=key)


async def test_wrong_credentials_are_denied(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong credentials give a permanent error without a secret in its message."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "some-other-secret")

    async with opened() as store:
        for call in (store.open(f"{place}/x"), store.upload(f"{place}/x", repeat(b"x" * MIB, 9))):
            with pytest.raises(ObjectDenied, match="SignatureDoesNotMatch") as told:
                await call
            assert "some-other-secret" not in str(told.value)


async def test_credentials_that_may_only_read_are_denied_to_write(
    place: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-only credentials are refused for both kinds of upload, and can read."""
    async with opened() as store:
        await store.put(f"{place}/x", b"x")
    for name, value in server.reader.items():
        monkeypatch.setenv(name, value)

    async with opened() as store:
        assert await read_all(store, f"{place}/x") == b"x"
        for size in (1, 9):
            with pytest.raises(ObjectDenied, match="AccessDenied"):
                await store.upload(f"{place}/y", repeat(b"x" * MIB, size))


async def test_a_staged_object_that_may_not_be_deleted_stays(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its result has its final name, and a failure must not follow.

    The log names the missing right once, not for each result.
    """

    def make_client_without_deletion(settings: ObjectSettings) -> Any:
        client = s3_client.make_client(settings)
        refusal = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
        refused = (SimpleNamespace(status_code=403), refusal)
        client.meta.events.register("before-call.s3.DeleteObject", lambda **call: refused)
        return client

    monkeypatch.setattr(s3_store, "make_client", make_client_without_deletion)

    async with opened() as store:
        for name in ("first", "second"):
            tag = await store.upload(f"{place}/staged-{name}", chunks_of(name.encode()))
            for _ in range(2):  # a repeat after a crash, too
                await store.publish(f"{place}/staged-{name}", tag, f"{place}/{name}")
                await store.delete(f"{place}/staged-{name}")
            assert await read_all(store, f"{place}/{name}") == name.encode()
    assert ["s3:DeleteObject" in each for each in caplog.messages if "staged object" in each] == [True]


@pytest.mark.parametrize("code", ["BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"])
async def test_a_body_that_was_damaged_on_its_way_is_sent_later(
    place: str, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """The store answers 400, and a repeat may succeed: a result must not become a failure for it."""

    def make_client_with_damages(settings: ObjectSettings) -> Any:
        client = s3_client.make_client(settings)
        refusal = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}
        refused = (SimpleNamespace(status_code=400), refusal)
        client.meta.events.register("before-call.s3.PutObject", lambda **call: refused)
        return client

    monkeypatch.setattr(s3_store, "make_client", make_client_with_damages)

    async with opened() as store:
        with pytest.raises(ObjectUnavailable, match=code):
            await store.put(f"{place}/x", b"x")


async def test_missing_credentials_are_said(place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Missing credentials are an error that is not permanent, and are used once they are available.

    A request must not fail for good because the machine's metadata service did not answer for a moment.
    """
    with monkeypatch.context() as without:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            without.delenv(name, raising=False)
        without.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        without.setenv("AWS_EC2_METADATA_DISABLED", "true")

        async with opened() as store:
            with pytest.raises(ObjectUnavailable, match="no AWS credentials") as caught:
                await store.put(f"{place}/x", b"x")
            assert not caught.value.is_permanent
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "journal-key")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "journal-secret")
            await store.put(f"{place}/x", b"x")


async def test_a_missing_bucket_and_a_missing_key_are_told_apart(place: str) -> None:
    async with opened() as store:
        with pytest.raises(ObjectMissing, match=r"there is no s3://.*/none"):
            await store.open(f"{place}/none")
        with pytest.raises(ObjectMissing, match="no bucket no-such-bucket"):
            await store.open("s3://no-such-bucket/x")
        with pytest.raises(ObjectMissing, match="no bucket no-such-bucket"):
            await store.publish("s3://no-such-bucket/x", "tag", "s3://no-such-bucket/y")


async def test_inputs_may_be_bound_to_prefixes(place: str) -> None:
    """Inputs may be limited to prefixes, since the proxy's credentials may permit more than clients should read."""
    async with opened(input_prefixes=(f"{place}/allowed/",)) as store:
        store.check_input(f"{place}/allowed/x")
        with pytest.raises(LocationRefused, match=r"objects\.input_prefixes"):
            await store.open(f"{place}/other/x")


@pytest.mark.parametrize("url", ["s3://Bucket_/x", "s3:///x", "s3://b", "s3://bucket/"])
async def test_urls_that_name_no_object_are_refused(url: str) -> None:
    """A URL without an object is refused, by the product's checks or the library's."""
    async with opened() as store:
        with pytest.raises((LocationRefused, ObjectMissing)):
            await store.open(url)


def test_settings_that_s3_would_refuse_are_refused_first() -> None:
    """Settings outside S3's limits for parts and copies are refused."""
    with pytest.raises(ConfigError, match="part_bytes"):
        ObjectSettings(part_bytes=MIB)
    with pytest.raises(ConfigError, match="max_output_bytes"):
        ObjectSettings(max_output_bytes=6 << 30)
    with pytest.raises(ConfigError, match="input_prefixes"):
        ObjectSettings(input_prefixes=("bucket",))
