"""A guarded fleet of real TorchServe instances, from boto3 to the session in the worker's memory."""

import json
import os
import secrets
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import openai
import psutil
import pytest
import requests
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials as BotoCredentials
from botocore.exceptions import ClientError
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as socket_connect

from tests.certificates import make_certificate
from tests.torchserve.conftest import Fleet, run_fleet
from tests.torchserve.drawings import draw
from tests.torchserve.test_faults import ask_until_answered, worker_pids
from tests.torchserve.test_sessions import SAMPLES, Chat, data_url, open_session
from tests.waiting import wait_until

KEYS = {"AKIAONE": secrets.token_hex(20), "AKIATWO": secrets.token_hex(20)}
TOKEN, OTHERS_TOKEN, ADMIN_TOKEN = (secrets.token_hex(16) for _ in range(3))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "fleet")


@pytest.fixture(scope="module")
def guarded(
    archives: Path, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """Run a fleet with keys from a file, tokens from the environment, TLS, and no journal."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys"
    keys.touch(0o600)
    keys.write_text("".join(f"key {key_id} {secret}\n" for key_id, secret in KEYS.items()))
    tls = ("--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1]))
    environment = {"TORCHMOOR_TOKENS": f"alice:{TOKEN},bob:{OTHERS_TOKEN}", "TORCHMOOR_ADMIN_TOKEN": ADMIN_TOKEN}
    with run_fleet(
        *("--keys", str(keys), *tls, "--journal", "off"),
        run_dir=folder / "run",
        log=folder / "up.log",
        environment=environment,
    ) as fleet:
        yield fleet
    log = (folder / "up.log").read_text()
    assert not any(secret in log for secret in (*KEYS.values(), TOKEN, OTHERS_TOKEN, ADMIN_TOKEN))


def connect(fleet: Fleet, certificate: tuple[Path, Path], key_id: str, secret: str = "") -> Any:
    return boto3.client(
        "sagemaker-runtime",
        endpoint_url=fleet.runtime,
        region_name="us-east-1",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret or KEYS[key_id],
        verify=str(certificate[0]),
        config=Config(retries={"total_max_attempts": 1}, read_timeout=90),
    )


def test_sessions_of_a_guarded_fleet_belong_to_their_callers(guarded: Fleet, certificate: tuple[Path, Path]) -> None:
    """The worker mints ids for the principal that the proxy names; another key cannot use or close a session."""
    owner, other = (connect(guarded, certificate, key_id) for key_id in KEYS)
    chat = open_session(owner, image=data_url((SAMPLES / "red_circle.png").read_bytes()))

    assert chat.ask("What color is the circle?") == "The circle is red."
    with pytest.raises(ClientError) as caught:
        Chat(other, chat.id).ask("What color is the circle?")
    assert caught.value.response["Error"]["Code"] == "ValidationError"
    with pytest.raises(ClientError) as caught:
        Chat(connect(guarded, certificate, "AKIAONE", "x" * 40), chat.id).ask("What color is the circle?")
    assert caught.value.response["Error"]["Code"] == "InvalidSignatureException"
    assert chat.ask("What color is the circle?") == "The circle is red."
    chat.close()


def test_openai_comes_in_with_its_token(guarded: Fleet, certificate: tuple[Path, Path]) -> None:
    """OpenAI's client connects over TLS with its api_key."""
    for key, is_good in ((TOKEN, True), ("wrong", False)):
        with openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=certificate[0])) as http:
            client = openai.OpenAI(base_url=f"{guarded.runtime}/v1", api_key=key, max_retries=0, http_client=http)
            messages: Any = [{"role": "user", "content": "hi"}]
            if is_good:
                assert client.chat.completions.create(model="llava", messages=messages, max_tokens=4).choices
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.chat.completions.create(model="llava", messages=messages)


def test_responses_belong_to_their_callers(guarded: Fleet, certificate: tuple[Path, Path]) -> None:
    """Another caller's id is not found by any method."""
    with openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=certificate[0])) as http:
        alice, bob = (
            openai.OpenAI(base_url=f"{guarded.runtime}/v1", api_key=key, max_retries=0, http_client=http)
            for key in (TOKEN, OTHERS_TOKEN)
        )
        first = alice.responses.create(model="llava", input="What is this?")

        for use in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="not found"):
                use(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            bob.responses.create(model="llava", input="And this?", previous_response_id=first.id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        assert alice.responses.retrieve(first.id) == first

        compacted: Any = [item.to_dict() for item in alice.responses.compact(model="llava", input="Hello").output]
        file = alice.files.create(file=draw("circle", "red"), purpose="vision")
        with pytest.raises(openai.NotFoundError):
            bob.responses.create(model="llava", input=[*compacted, {"role": "user", "content": "And this?"}])
        with pytest.raises(openai.NotFoundError):
            bob.files.content(file.id)
        assert bob.files.list().data == []


def sign(fleet: Fleet, key_id: str) -> dict[str, str]:
    """Return the header fields of a signed handshake."""
    request = AWSRequest("GET", f"{fleet.runtime}/v1/responses")
    SigV4Auth(BotoCredentials(key_id, KEYS[key_id]), "sagemaker", "us-east-1").add_auth(request)
    return dict(request.headers)


def test_websockets_of_a_guarded_fleet_belong_to_their_callers(guarded: Fleet, certificate: tuple[Path, Path]) -> None:
    """A token or a signature opens a connection, on which another caller's response is not found."""
    context = ssl.create_default_context(cafile=certificate[0])
    address = guarded.runtime.replace("https://", "wss://") + "/v1/responses"
    message = {"type": "response.create", "model": "llava", "input": "What is this?", "max_output_tokens": 2}

    def ask(headers: dict[str, str], **fields: str) -> dict[str, Any]:
        with socket_connect(address, ssl=context, additional_headers=headers, open_timeout=60) as client:
            client.send(json.dumps({**message, **fields}))
            while True:
                last: dict[str, Any] = json.loads(client.recv(timeout=90))
                if last["type"] in ("response.completed", "response.incomplete", "error"):
                    return last

    callers = {"token": {"Authorization": f"Bearer {TOKEN}"}, "key": sign(guarded, "AKIAONE")}
    first = {name: ask(headers)["response"]["id"] for name, headers in callers.items()}

    assert ask(callers["token"], previous_response_id=first["token"])["type"] == "response.incomplete"
    assert ask(sign(guarded, "AKIAONE"), previous_response_id=first["key"])["type"] == "response.incomplete"
    for headers in (callers["token"], sign(guarded, "AKIATWO")):
        assert ask(headers, previous_response_id=first["key"])["error"]["code"] == "previous_response_not_found"
    wrong = {**sign(guarded, "AKIAONE"), "X-Amz-Date": "20200101T000000Z"}
    for headers, status in (({}, 401), ({"Authorization": "Bearer wrong"}, 401), (wrong, 401)):
        with pytest.raises(InvalidStatus) as caught:
            ask(headers)
        assert caught.value.response.status_code == status


def test_only_the_proxy_is_reached(guarded: Fleet, certificate: tuple[Path, Path]) -> None:
    """TorchServe listens on loopback and never receives clients' secrets; the proxy serves its inference paths only."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for path in ("/models", "/models/llava", "/metrics"):
        answer = requests.get(guarded.runtime + path, headers=headers, verify=str(certificate[0]), timeout=60)
        assert answer.status_code == 404
    assert requests.get(f"{guarded.admin}/instances", timeout=60).status_code == 401
    ports = {instance[kind] for instance in instances(guarded) for kind in ("port", "management_port", "metrics_port")}
    hosts = listening_hosts(ports)
    assert hosts
    assert hosts <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    children = [child.pid for child in psutil.Process(guarded.process.pid).children()]
    assert children
    for pid in children:
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
        assert not any(secret in environment for secret in (*KEYS.values(), TOKEN, OTHERS_TOKEN, ADMIN_TOKEN))


def instances(fleet: Fleet) -> list[dict[str, Any]]:
    """Return the instances as the admin plane lists them to an operator with its token."""
    answer = requests.get(f"{fleet.admin}/instances", auth=("", ADMIN_TOKEN), timeout=60)
    return answer.json()["instances"]


def listening_hosts(ports: set[int]) -> set[str]:
    """Return the kernel's list of local addresses of listening sockets on these ports."""
    found = psutil.net_connections("tcp")
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port in ports}


@pytest.mark.slow
def test_without_a_journal_a_dead_workers_session_is_lost(guarded: Fleet, certificate: tuple[Path, Path]) -> None:
    """Without a journal, the next question of a lost session is a ValidationError with advice."""
    client = connect(guarded, certificate, "AKIAONE")
    chat = open_session(client, image=data_url(draw("circle", "red")))

    for pid in worker_pids(guarded.run_dir, "llava-0"):
        os.kill(pid, signal.SIGKILL)

    with pytest.raises(ClientError, match=r"ValidationError.*memory is gone"):
        ask_until_answered(chat, "What color is the circle?")
    wait_until(lambda: [i["state"] for i in instances(guarded)] == ["ready"], "the worker is back")
    again = open_session(client, image=data_url(draw("square", "blue")))
    assert "blue" in again.ask("What color is the square?")
