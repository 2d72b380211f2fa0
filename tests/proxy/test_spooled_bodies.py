"""Long bodies: each is kept in a file without a name until its answer begins, and is sent from there."""

import asyncio
import logging
import os
import socket
from hashlib import sha256
from pathlib import Path

import pytest

from tests.proxy.conftest import MakeStage, Stage, make_session_id, read_answer
from tests.proxy.fake_instance import FakeInstance, Received, refusing
from tests.proxy.test_access import CREDENTIALS, SECRET
from tests.proxy.test_bodies_in_flight import arriving, ask, begin_chunked, chunk
from tests.proxy.test_late_binding import LATE, Held, received, send, status, waiting
from torchmoor.config.limits import LimitSettings
from torchmoor.proxy.http.spool import PIECE_BYTES, Spool

KEPT = 64 << 10  # longer bodies are spooled
BODY = bytes(range(256)) * (6 << 10)  # 1.5 MiB: several pieces
LIMITS = LimitSettings(max_replay_body_bytes=KEPT)


def spooling(make_stage: MakeStage, **options: object) -> Stage:
    """Return two instances behind a proxy that keeps 64 KiB of a body in memory."""
    return make_stage(**{"limits": LIMITS, **options})


def spool(stage: Stage) -> Spool:
    return stage.proxy.data.parts.spool


def begin(stage: Stage, *, num_left: int = 1) -> socket.socket:
    """Send all but the last bytes of a request; return once the rest is in a file."""
    sock = stage.send(ask(BODY)[:-num_left])
    stage.until(lambda: spool(stage).num_bytes == len(BODY) - num_left, "the body in a file")
    return sock


@pytest.mark.parametrize("path", ["/endpoints/llava/invocations", "/predictions/llava"])
def test_long_body_reaches_its_instance_unchanged(make_stage: MakeStage, path: str) -> None:
    """Bodies of declared and undeclared length arrive unchanged, and their files are closed with the answers."""
    stage = spooling(make_stage)
    chunked = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunked += chunk(BODY[:100_000]) + chunk(BODY[100_000:]) + b"0\r\n\r\n"

    answers = [stage.raw(ask(BODY, path=path)), stage.raw(chunked), stage.raw(ask(b"short", path=path))]

    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * 3
    bodies = received(stage.a) + received(stage.b)
    assert sorted(map(len, bodies)) == [5, len(BODY), len(BODY)]
    assert {sha256(body).digest() for body in bodies if len(body) > 5} == {sha256(BODY).digest()}
    stage.until(lambda: spool(stage).num_bytes == 0, "the file gone")


def test_long_body_is_counted_while_it_arrives(make_stage: MakeStage) -> None:
    """A body in a file counts among the arriving bodies; a disconnect frees it and the file."""
    stage = spooling(make_stage)
    sock = begin(stage)
    assert arriving(stage) == len(BODY) - 1

    sock.close()

    stage.until(lambda: arriving(stage) == spool(stage).num_bytes == 0, "all freed")
    assert received(stage.a) + received(stage.b) == []


def test_slow_long_bodies_make_room(make_stage: MakeStage) -> None:
    """At the limit of arriving bodies, a dropped body's file is closed."""
    limits = LimitSettings(
        max_body_bytes=len(BODY),
        max_passthrough_body_bytes=len(BODY),
        max_replay_body_bytes=KEPT,
        max_arriving_bytes=len(BODY),
    )
    stage = spooling(make_stage, limits=limits)
    slow = begin(stage, num_left=len(BODY) - 6 * KEPT)

    answer = stage.raw(ask(BODY))

    assert read_answer(slow).startswith(b"HTTP/1.1 503")
    assert answer.startswith(b"HTTP/1.1 200")
    stage.until(lambda: spool(stage).num_bytes == 0, "the file gone")


def test_another_instance_gets_a_long_body_whose_instance_dies(make_stage: MakeStage) -> None:
    """If an instance dies during a long body, another one gets it from the beginning of the file."""
    stage = spooling(make_stage)
    died = die_in_body(stage.a, stage.b)

    answer = stage.raw(ask(BODY))

    assert answer.startswith(b"HTTP/1.1 200")
    assert len(died) == 1
    assert received(stage.a) + received(stage.b) == [BODY]
    stage.until(lambda: spool(stage).num_bytes == 0, "the file gone")


def die_in_body(*instances: FakeInstance) -> list[str]:
    """Make the first instance that gets a long body reset the connection after a part of it."""
    died: list[str] = []

    def patch(fake: FakeInstance) -> None:
        read = fake.read

        async def read_or_die(reader: asyncio.StreamReader) -> Received | None:
            if died:
                return await read(reader)
            head = await reader.readuntil(b"\r\n\r\n")
            if b"\r\nx-torchmoor-operation:" in head.lower() or head.startswith(b"GET"):
                raise ConnectionError
            await reader.readexactly(PIECE_BYTES)
            died.append(fake.name)
            raise ConnectionError

        fake.read = read_or_die

    for fake in instances:
        patch(fake)
    return died


def test_turn_with_a_long_body_ends_with_its_instance(make_stage: MakeStage) -> None:
    """Without a journal, a turn is not sent to another instance, and its file is closed."""
    stage = spooling(make_stage)
    died = die_in_body(stage.a)

    answer = stage.raw(ask(BODY, more=f"X-Amzn-SageMaker-Session-Id: {make_session_id('a')}\r\n"))

    assert answer.startswith(b"HTTP/1.1 503")
    assert died == ["a"]
    assert received(stage.b) == []
    stage.until(lambda: spool(stage).num_bytes == 0, "the file gone")


def test_long_body_waits_in_its_file(make_stage: MakeStage) -> None:
    """A request waits for a free instance with its long body in the file."""
    stage = spooling(make_stage, late_binding=LATE, names=("a",), max_inflight_body_bytes=2 * len(BODY) + KEPT)
    held = Held(stage, stage.a)
    first = send(stage, BODY)
    stage.until(lambda: received(stage.a) == [BODY], "the first one sent")

    second = send(stage, BODY)
    assert waiting(stage) == 1
    assert spool(stage).num_bytes == 2 * len(BODY)
    held.let_go(BODY)
    held.let_go(BODY)

    assert [status(first), status(second)] == [200, 200]
    assert received(stage.a) == [BODY, BODY]


def test_client_that_leaves_while_its_body_is_sent_frees_all(make_stage: MakeStage) -> None:
    """A client's disconnect frees the file and the instance, which does not read the body."""
    body = bytes(32 << 20)
    stage = spooling(make_stage, names=("a",), max_inflight_body_bytes=4 * len(body))
    begun = asyncio.Event()

    async def read_nothing(reader: asyncio.StreamReader) -> Received | None:
        await reader.readuntil(b"\r\n\r\n")
        begun.set()
        await asyncio.sleep(3600)
        return None

    stage.a.read = read_nothing
    sock = stage.socket()
    sock.sendall(ask(body, path="/predictions/llava"))
    stage.until(begun.is_set, "the instance has the head")
    assert spool(stage).num_bytes == len(body)

    sock.close()

    stage.until(lambda: spool(stage).num_bytes == 0 == stage.outstanding(), "all freed")


def test_connection_with_an_unsent_body_is_not_used_again(make_stage: MakeStage) -> None:
    """A connection is not reused if its instance answered before it read the whole body."""
    stage = spooling(make_stage, names=("a",))
    long = bytes(6 << 20)
    read = stage.a.read

    async def read_head(reader: asyncio.StreamReader) -> Received | None:
        head = await reader.readuntil(b"\r\n\r\n")
        if f"content-length: {len(long)}".encode() in head.lower():
            return Received("POST", "/early", {}, b"")
        reader.feed_data(b"")
        return await rest(head, reader)

    async def rest(head: bytes, reader: asyncio.StreamReader) -> Received | None:
        whole = asyncio.StreamReader(limit=1 << 20)
        whole.feed_data(head)
        if b"content-length: 5" in head.lower():
            whole.feed_data(await reader.readexactly(5))
        return await read(whole)

    stage.a.read = read_head

    first, second = stage.raw(ask(long)), stage.raw(ask(b"short"))

    assert first.startswith(b"HTTP/1.1 200")
    assert second.startswith(b"HTTP/1.1 200")
    assert received(stage.a) == [b"", b"short"]
    assert stage.a.num_connections == 2


def test_without_free_space_long_bodies_stay_in_memory(make_stage: MakeStage, caplog: pytest.LogCaptureFixture) -> None:
    """Long bodies are served from memory, with one log line until a file can be created again."""
    stage = spooling(make_stage, limits=LimitSettings(max_replay_body_bytes=KEPT, min_spool_free_bytes=1 << 60))

    with caplog.at_level(logging.WARNING):
        answers = [stage.raw(ask(BODY)) for _ in range(2)]

    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * 2
    assert received(stage.a) + received(stage.b) == [BODY, BODY]
    [line] = [record.getMessage() for record in caplog.records if "bodies stay in memory" in record.getMessage()]
    assert "limits.min_spool_free_bytes" in line


def test_body_whose_file_can_no_longer_grow_is_dropped(make_stage: MakeStage) -> None:
    """A body whose file cannot grow gets 503 with Retry-After; a retry then stays in memory."""
    stage = spooling(make_stage)
    sock = begin(stage)
    spool(stage).min_free_bytes = 1 << 60  # as if others had filled the disk

    sock.sendall(BODY[-1:])
    answer = read_answer(sock)

    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in answer
    stage.until(lambda: spool(stage).num_bytes == 0, "the file gone")
    assert stage.raw(ask(BODY)).startswith(b"HTTP/1.1 200")


def test_full_disk_leaves_the_rest_of_the_proxy_alone(make_stage: MakeStage, tmp_path: Path) -> None:
    """A full disk, or a folder that cannot be written, does not affect other requests."""
    stage = spooling(make_stage, limits=LimitSettings(max_replay_body_bytes=KEPT, spool_folder=str(tmp_path / "gone")))

    assert stage.raw(ask(BODY)).startswith(b"HTTP/1.1 200")


def test_files_have_no_names(make_stage: MakeStage, tmp_path: Path) -> None:
    """Files have no names, so that nothing is left of them when the proxy is killed."""
    stage = spooling(make_stage, limits=LimitSettings(max_replay_body_bytes=KEPT, spool_folder=str(tmp_path)))

    sock = begin(stage)

    assert os.listdir(tmp_path) == []
    sock.sendall(BODY[-1:])
    assert status(sock) == 200


def test_signed_body_stays_in_memory(make_stage: MakeStage) -> None:
    """A signed body stays in memory until its signature is verified; the length of such bodies is limited."""
    stage = spooling(make_stage, credentials=CREDENTIALS)

    answer = stage.client(secret=SECRET).invoke_endpoint(EndpointName="llava", Body=BODY)

    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert received(stage.a) + received(stage.b) == [BODY]


def test_body_of_undeclared_length_counts_at_its_instance(make_stage: MakeStage) -> None:
    """A body of undeclared length counts at its instance with its whole length."""
    stage = spooling(make_stage, names=("a",), max_inflight_body_bytes=2 * len(BODY) - 2)
    sock = begin_chunked(stage, BODY)

    sock.sendall(b"0\r\n\r\n")

    assert b"longer than the limit" in read_answer(sock)


def test_metric_counts_bodies_that_fill_the_disk(make_stage: MakeStage) -> None:
    """Dropped bodies are counted by the setting of the limit that they exceed."""
    stage = spooling(make_stage)
    sock = begin(stage)
    spool(stage).min_free_bytes = 1 << 60
    sock.sendall(BODY[-1:])
    assert read_answer(sock).startswith(b"HTTP/1.1 503")

    page = stage.admin("/metrics").text

    assert 'CallerLimited_total{setting="min_spool_free_bytes"} 1.0' in page


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> LimitSettings:
    """Return limits of a proxy with descriptors for four client connections, their instances and two files."""
    monkeypatch.setattr("torchmoor.run.data_plane.find_limit", lambda: 266)
    return LimitSettings(max_replay_body_bytes=KEPT, reserved_descriptors=256)


def test_long_body_above_the_files_that_fit_is_refused(make_stage: MakeStage, few_files: LimitSettings) -> None:
    """A long body without a free file gets 503 with Retry-After.

    Short ones are served, and long ones once a file is closed.
    """
    stage = spooling(make_stage, limits=few_files)
    held = [begin_another(stage, number) for number in (1, 2)]
    assert stage.proxy.data.server.parts.max_connections == 4

    refused, short = stage.raw(ask(BODY)), stage.raw(ask(b"short"))
    for sock in held:
        sock.sendall(BODY[-1:])

    assert refused.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in refused
    assert short.startswith(b"HTTP/1.1 200")
    assert [status(sock) for sock in held] == [200, 200]
    stage.until(lambda: spool(stage).num_files == 0, "no file counted")
    assert stage.raw(ask(BODY)).startswith(b"HTTP/1.1 200")
    page = stage.admin("/metrics").text
    assert 'CallerLimited_total{setting="reserved_descriptors"} 1.0' in page


def begin_another(stage: Stage, number: int) -> socket.socket:
    """Send all but the last byte of a request; return once this number of bodies is in files."""
    sock = stage.send(ask(BODY)[:-1])
    stage.until(lambda: spool(stage).num_bytes == number * (len(BODY) - 1), "the body in a file")
    return sock


@pytest.mark.parametrize("end", ["client leaves", "body too slow", "disk full", "instance dies", "instance refuses"])
def test_file_counts_until_it_is_closed(make_stage: MakeStage, few_files: LimitSettings, end: str) -> None:
    """A file counts until it is closed, however its request ends."""
    stage = spooling(make_stage, limits=few_files, names=("a",))
    sock = begin(stage)
    assert spool(stage).num_files == 1

    if end == "client leaves":
        sock.close()
    elif end == "body too slow":
        stage.loop.call_soon_threadsafe(expire, stage)
        assert status(sock) == 408
    else:
        if end == "disk full":
            spool(stage).min_free_bytes = 1 << 60
        elif end == "instance dies":
            die_in_body(stage.a)
        else:
            stage.a.behave = refusing(400, "InvalidRequest", "no")
        sock.sendall(BODY[-1:])
        read_answer(sock)

    stage.until(lambda: spool(stage).num_files == 0, "no file counted")


def expire(stage: Stage) -> None:
    """Make the deadlines of all connections pass."""
    for connection in list(stage.proxy.data.server.connections):
        connection.expire()
