"""A proxy without a free file descriptor: this is its own fault, not its instances'."""

import errno
import os
import resource

import pytest

from tests.descriptors import without_free_descriptors
from tests.proxy.conftest import CHUNKS_END, MakeStage, make_session_id, read_answer, read_until
from tests.proxy.fake_instance import Gate, Received, Wire
from torchmoor.config.limits import LimitSettings
from torchmoor.proxy.http.descriptors import BODY_FILES, find_limit, limit_connections, limit_files
from torchmoor.proxy.instances.instance import InstanceState

PING = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


def test_a_shortage_is_the_proxys_own(make_stage: MakeStage) -> None:
    """The client may try again; the instance stays ready, and its breaker counts neither a failure nor a success."""
    stage = make_stage(names=("a",))
    instance = stage.instance("a")
    stage.loop.call_soon_threadsafe(stage.proxy.data.recovery.on_failed, instance)
    with stage.socket() as client:
        client.sendall(PING)
        assert read_answer(client).startswith(b"HTTP/1.1 200")
        with without_free_descriptors():
            client.sendall(POST)
            answer = read_answer(client)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: " in answer.lower()
        assert b"no free file descriptor, local port or memory" in answer
        assert (instance.state, instance.breaker.num_failures) == (InstanceState.READY, 1)

        client.sendall(POST)
        assert read_answer(client).startswith(b"HTTP/1.1 200")

    metrics = stage.admin("/metrics").text
    assert 'DescriptorShortages_total{endpoint="llava",variant="AllTraffic"} 1.0' in metrics
    assert 'NoCapacityInvocationFailures_total{endpoint="llava",variant="AllTraffic"} 0.0' in metrics


@pytest.mark.interpreted
def test_a_lack_of_local_ports_is_the_proxys_own(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instance, which other connections reach, stays ready, and its running stream goes on."""
    stage = make_stage(names=("a",))
    gate = Gate()

    async def stream(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain")
        await wire.chunk(b"begun")
        await gate.pass_through()
        await wire.chunk(b"")

    stage.a.behave = stream

    async def no_port(*_: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    with stage.socket() as client, stage.socket() as other:
        client.sendall(POST)
        gate.wait_reached()
        monkeypatch.setattr(stage.proxy.data.parts.connector, "connect", no_port)
        other.sendall(POST)
        refused = read_answer(other)
        gate.open()
        read_until(client, CHUNKS_END)

    assert refused.startswith(b"HTTP/1.1 503")
    assert b"retry-after: " in refused.lower()
    assert stage.instance("a").state is InstanceState.READY


def test_probes_that_find_no_descriptor_show_nothing(make_stage: MakeStage) -> None:
    """An instance stays ready, however many probes are not sent for lack of a descriptor."""
    stage = make_stage(names=("a",))
    health, instance = stage.proxy.health, stage.instance("a")

    with without_free_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            stage.run(health.ask(instance))
        for _ in range(stage.settings.health.unanswered_before_down):
            stage.call(health.suspect, instance)
            stage.until(lambda: not health.is_probing, "the probe is over")

    assert instance.state is InstanceState.READY


def test_the_limit_is_raised_whatever_starts_the_proxy(make_stage: MakeStage) -> None:
    """The proxy raises the limit to the hard limit, and derives the number of client connections from it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, before[1]))
    try:
        stage = make_stage()
        assert find_limit() == find_limit(is_hard=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    most, limits = stage.proxy.data.server.parts.max_connections, LimitSettings()
    expected = limit_connections(
        limits.max_connections, descriptors=find_limit(is_hard=True), reserved=limits.reserved_descriptors
    )
    assert most == expected


def test_idle_connections_make_room_for_new_ones(make_stage: MakeStage) -> None:
    """The pools of all instances together have as many connections as there may be clients."""
    stage = make_stage(limits=LimitSettings(max_connections=1))
    head, body = POST.split(b"\r\n\r\n")

    with stage.socket() as client:
        for name in ("a", "b"):
            session = b"X-Amzn-SageMaker-Session-Id: " + make_session_id(name).encode()
            client.sendall(b"\r\n".join((head, session, b"", body)))
            assert read_answer(client).startswith(b"HTTP/1.1 200")
        stage.until(lambda: len(stage.instance("b").idle) == 1, "the connection to b is idle")
        assert not stage.instance("a").idle


@pytest.mark.parametrize(
    ("descriptors", "connections", "files"),
    [(1024, 288, 192), (20_000, 9360, BODY_FILES), (100_000, 10_000, 79_744), (float("inf"), 10_000, float("inf"))],
)
def test_connections_and_files_share_the_descriptors(descriptors: float, connections: int, files: float) -> None:
    """Files may use a quarter of the descriptors, at most 1,024, and those that connections do not need."""
    assert limit_connections(10_000, descriptors=descriptors, reserved=256) == connections
    assert limit_files(connections, descriptors=descriptors, reserved=256) == files
    assert 2 * connections + files + 256 <= descriptors
