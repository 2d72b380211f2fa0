"""Run the demo overlay's own pods with podman: Valkey, two instances and a proxy, and boto3 as the client.

tests/kubernetes/pod_spec.py lists the parts of the manifests that podman cannot play; cluster.py replaces them.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from typing import Any

import boto3
import pytest
import requests
from botocore.config import Config

from tests.kubernetes.cluster import Cluster, Pod
from tests.kubernetes.engine import LastingPodman
from tests.kubernetes.manifests import Overlay, read_secret
from tests.tools import require
from tests.torchserve.drawings import data_url
from tests.torchserve.test_sessions import SAMPLES, Chat, open_session
from tests.waiting import wait_until

pytestmark = [pytest.mark.image, pytest.mark.long, pytest.mark.timeout(1800)]

QUESTION, ANSWER = "What color is the circle?", "The circle is red."
NUM_CLIENTS = 3
MAX_TURNS = 40
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def cluster(rendered: Callable[[str], Overlay], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run the whole demo overlay and wait until it is ready."""
    require("dnsmasq", "ip")
    demo, folder = rendered("demo"), tmp_path_factory.mktemp("cluster")
    with LastingPodman() as engine:
        engine.make_images(demo)
        with Cluster(demo, engine, folder) as cluster:
            cluster.start("valkey")
            cluster.wait_ready("valkey-0")
            for number in range(demo.workload("llava").spec["replicas"]):
                cluster.start("llava", number)
            cluster.start("torchmoor")
            for name in ("llava-0", "llava-1", "torchmoor-0"):
                cluster.wait_ready(name)
            until_states(cluster, {"llava-0": "ready", "llava-1": "ready"})
            yield cluster


def read_keys(cluster: Cluster) -> dict[str, list[str]]:
    """Return the lines of the key file by kind."""
    text = read_secret(cluster.overlay.get("Secret", "torchmoor-access"))["keys.txt"]
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()}


def client(cluster: Cluster) -> Any:
    """Return a boto3 client with the key that make_secrets.sh generated; it does not retry."""
    key, secret = read_keys(cluster)["key"]
    return boto3.client(
        "sagemaker-runtime",
        endpoint_url=cluster.pods["torchmoor-0"].url("runtime"),
        region_name="us-east-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(retries={"total_max_attempts": 1}, read_timeout=PATIENCE_S),
    )


def states(cluster: Cluster) -> dict[str, str]:
    """Return the states of the instances that the proxy's admin plane reports."""
    (token,) = read_keys(cluster)["admin"]
    url = cluster.pods["torchmoor-0"].url("admin") + "/instances"
    answer = requests.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=60)
    return {row["name"]: row["state"] for row in answer.json()["instances"]}


def until_states(cluster: Cluster, wanted: dict[str, str]) -> None:
    wait_until(lambda: states(cluster) == wanted, f"the proxy reports {wanted}", deadline_s=PATIENCE_S)


def open_with_picture(runtime: Any) -> Chat:
    return open_session(runtime, image=data_url((SAMPLES / "red_circle.png").read_bytes()))


def holder(chat: Chat) -> str:
    """Return the instance whose name is in the session's id."""
    return next(name for name in ("llava-0", "llava-1") if f"-{name}-" in chat.id)


@contextmanager
def asking(chats: list[Chat]) -> Iterator[list[str]]:
    """Let all clients send requests repeatedly, every other one for a stream. Yields the responses so far.

    Each session ends after some turns, because the tiny model cannot handle a conversation of a hundred turns.
    """
    answers: list[str] = []
    failures: list[BaseException] = []
    is_over = threading.Event()

    def ask(chat: Chat) -> None:
        try:
            while True:
                for _ in range(MAX_TURNS // 2):
                    if is_over.is_set():
                        return
                    answers.append(chat.ask(QUESTION))
                    answers.append(b"".join(chat.stream(QUESTION)).decode())
                chat = open_with_picture(chat.client)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(chat,)) for chat in chats]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        for thread in threads:
            thread.join(timeout=PATIENCE_S)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)


def test_a_session_outlives_the_pod_that_held_it(cluster: Cluster) -> None:
    """After its pod is killed, a session continues on another instance from Valkey; the pod returns under its name."""
    chat = open_with_picture(client(cluster))
    assert chat.ask(QUESTION) == ANSWER
    name = holder(chat)
    other = {"llava-0": "llava-1", "llava-1": "llava-0"}[name]
    before = cluster.pods[name].address

    cluster.kill(name)
    assert chat.ask(QUESTION) == ANSWER

    until_states(cluster, {other: "ready"})
    cluster.start("llava", int(name[-1]))
    cluster.wait_ready(name)
    until_states(cluster, {"llava-0": "ready", "llava-1": "ready"})
    assert cluster.pods[name].address != before
    assert chat.ask(QUESTION) == ANSWER


def test_an_instance_that_is_deleted_under_load_loses_nothing(cluster: Cluster) -> None:
    """Deleting an instance under load loses no answers, and the pod ends well within its grace period."""
    chats = [open_with_picture(client(cluster)) for _ in range(NUM_CLIENTS)]
    name = holder(chats[0])
    grace_s = cluster.pods[name].workload.pod["terminationGracePeriodSeconds"]

    with asking(chats) as answers:
        wait_until(lambda: len(answers) >= 2 * NUM_CLIENTS, "the clients have answers")
        code, took_s = cluster.delete(name)
        seen = len(answers)
        wait_until(
            lambda: len(answers) >= seen + 2 * NUM_CLIENTS, "the clients have more answers", deadline_s=PATIENCE_S
        )

    assert [answer for answer in answers if ANSWER not in answer] == []
    assert code == 0
    assert took_s < grace_s / 2
    cluster.start("llava", int(name[-1]))
    cluster.wait_ready(name)
    until_states(cluster, {"llava-0": "ready", "llava-1": "ready"})


def test_a_proxy_that_is_deleted_ends_what_it_has_begun(cluster: Cluster) -> None:
    """A deleted proxy serves during preStop, then refuses requests, completes running ones, and exits with 0."""
    chat = open_with_picture(client(cluster))
    pod = cluster.pods["torchmoor-0"]
    _, token = read_keys(cluster)["token"]
    body = json.dumps({"inputs": "Hello", "parameters": {"max_new_tokens": 4}}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "Content-Length": len(body)}
    deleted: list[tuple[int, float]] = []
    deleting = threading.Thread(target=lambda: deleted.append(cluster.delete("torchmoor-0")))

    with closing(HTTPConnection(pod.address, pod.port("runtime"), timeout=PATIENCE_S)) as begun:
        begun.putrequest("POST", "/endpoints/llava/invocations")
        for name, value in headers.items():
            begun.putheader(name, str(value))
        begun.endheaders(body[:10])
        deleting.start()
        assert chat.ask(QUESTION) == ANSWER
        wait_until(lambda: not takes_connections(pod), "the proxy refuses connections", deadline_s=PATIENCE_S)
        begun.send(body[10:])
        answer = begun.getresponse()
        assert (answer.status, b"generated_text" in answer.read()) == (200, True)

    deleting.join(PATIENCE_S)
    assert deleted[0][0] == 0
    cluster.start("torchmoor")
    cluster.wait_ready("torchmoor-0")
    assert Chat(client(cluster), chat.id).ask(QUESTION) == ANSWER


def takes_connections(pod: Pod) -> bool:
    with suppress(OSError), socket.create_connection((pod.address, pod.port("runtime")), timeout=5):
        return True
    return False
