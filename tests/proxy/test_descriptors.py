"""A proxy without a free file descriptor: its own shortage, and not a fault of its instances."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import requests

from tests.proxy.conftest import Stage, read_answer
from torchmoor.proxy.instances.instance import InstanceState

PING = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def without_free_descriptors() -> Iterator[None]:
    """Lower this process's limit to its highest descriptor, and use those below it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)


def test_a_shortage_is_the_proxys_own(make_stage: Callable[..., Stage]) -> None:
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
        assert (instance.state, instance.breaker.num_failures) == (InstanceState.READY, 1)

        client.sendall(POST)
        assert read_answer(client).startswith(b"HTTP/1.1 200")

    metrics = requests.get(f"{stage.proxy.admin_url}/metrics", timeout=60).text
    assert 'DescriptorShortages_total{endpoint="llava",variant="AllTraffic"} 1.0' in metrics
    assert 'NoCapacityInvocationFailures_total{endpoint="llava",variant="AllTraffic"} 0.0' in metrics


def test_probes_that_find_no_descriptor_show_nothing(make_stage: Callable[..., Stage]) -> None:
    """However many are not sent, the instance stays ready."""
    stage = make_stage(names=("a",))
    health, instance = stage.proxy.health, stage.instance("a")

    with without_free_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            stage.run(health.ask(instance))
        for _ in range(stage.settings.health.unanswered_before_down):
            stage.loop.call_soon_threadsafe(health.suspect, instance)
            stage.until(lambda: not health.is_probing, "the probe is over")

    assert instance.state is InstanceState.READY
