"""The output of make_secrets.sh is valid for its readers: the proxies, the handlers and a real server."""

import asyncio
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
import yaml
from click.testing import CliRunner

from handlers.journal.event import Event
from handlers.journal.journal import ANYONE
from handlers.journal.url import open_journal
from handlers.settings.journal import JournalSettings
from tests.kubernetes.manifests import Overlay, copy_with_secrets, read_secret
from tests.servers import find_valkey, free_ports, wait_for_server
from tests.tools import require
from torchmoor.async_inference.queues.queue_url import open_queue
from torchmoor.async_inference.request import AsyncRequest
from torchmoor.cli.main import main
from torchmoor.config.async_queue import AsyncQueueSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.proxy.access.credential_sources import read_credentials

pytestmark = pytest.mark.redis

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SESSION = f"ts-seq-{'a' * 16}-{int(time.time()) + 3600:08x}-llava-0-k0{'a' * 26}"
REQUEST = AsyncRequest(
    inference_id="id-1",
    endpoint="llava",
    body=b"{}",
    output_location="s3://bucket/results/id-1.out",
    failure_location="s3://bucket/failures/id-1-error.out",
)


class Secrets:
    """The secrets of one overlay by name."""

    def __init__(self, overlay: Overlay) -> None:
        self.by_name = {each["metadata"]["name"]: read_secret(each) for each in overlay.of("Secret")}

    def __getitem__(self, name: str) -> dict[str, str]:
        return self.by_name[f"torchmoor-{name}"]


@pytest.fixture(scope="module")
def valkey(kubernetes_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Run a Valkey server with the manifest's arguments, besides its folders; return its port."""
    folder = tmp_path_factory.mktemp("valkey-users")
    (folder / "data").mkdir()
    users = kubernetes_folder / "components" / "secrets" / "generated" / "users.conf"
    text = (kubernetes_folder / "base" / "valkey.conf").read_text()
    text = text.replace("/etc/valkey-secret/users.conf", str(users)).replace("dir /data", f"dir {folder / 'data'}")
    (folder / "valkey.conf").write_text(text)
    (port,) = free_ports(1)
    with (folder / "log").open("ab") as log:
        command = [str(find_valkey()), str(folder / "valkey.conf"), "--port", str(port), "--bind", "127.0.0.1"]
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def answers() -> bool:
        try:
            with redis.Redis(port=port, username="probe", password="probe", protocol=2) as client:
                return bool(client.execute_command("PING"))
        except redis.RedisError:
            return False

    try:
        wait_for_server(process, answers, folder / "log")
        yield port
    finally:
        process.kill()
        process.wait(timeout=60)


def test_secrets_are_new_each_time_and_their_owner_s_alone(tmp_path: Path) -> None:
    """Secrets differ between checkouts, are readable by their owner only, and are never overwritten."""
    folders = [
        copy_with_secrets(tmp_path / name / "kubernetes") / "components" / "secrets" / "generated" for name in "ab"
    ]

    for path in folders[0].iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_text() != (folders[1] / path.name).read_text()
    again = subprocess.run([folders[0].parent / "make_secrets.sh"], capture_output=True, text=True, timeout=30)
    assert again.returncode == 1
    assert "remove it first" in again.stderr


def test_session_keys_and_clients_keys_are_such(demo: Overlay, tmp_path: Path) -> None:
    """Proxies and instances can read the keys; Prometheus gets the proxies' admin token."""
    secrets = Secrets(demo)
    path = tmp_path / "keys.txt"
    path.touch(mode=0o440)
    path.chmod(0o640)
    path.write_text(secrets["access"]["keys.txt"])

    credentials = read_credentials({}, path)

    assert len(SessionIdSettings.parse(secrets["session-keys"]["session-keys"]).keys["k0"]) == 32
    assert credentials.guards_data
    assert list(credentials.tokens) == ["client"]
    assert len(credentials.keys) == 1
    assert credentials.admin_token == secrets["access"]["admin-token"]


def test_the_configuration_can_be_served(overlay: Overlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchmoor serve --check` reports only that the DNS name does not exist here."""
    secrets = Secrets(overlay)
    keys = tmp_path / "keys.txt"
    keys.write_text(secrets["access"]["keys.txt"])
    keys.chmod(0o600)
    text = overlay.find_generated("ConfigMap", "torchmoor")["data"]["torchmoor.yaml"]
    content = yaml.safe_load(text)
    mounts = {each["name"]: each["mountPath"] for each in overlay.workload("torchmoor").containers[0]["volumeMounts"]}
    assert content["access"]["keys_file"] == f"{mounts['keys']}/keys.txt"
    content["access"]["keys_file"] = str(keys)
    content["Discovery"][0] |= {"nameservers": ["127.0.0.1:9"], "timeout_s": 0.1}
    path = tmp_path / "torchmoor.yaml"
    path.write_text(yaml.safe_dump(content))
    monkeypatch.setenv("TORCHMOOR_SESSION_KEYS", secrets["session-keys"]["session-keys"])
    monkeypatch.setenv("TORCHMOOR_ASYNC_QUEUE", secrets["valkey-urls"]["queue"])

    result = CliRunner().invoke(main, ["serve", "--config", str(path), "--check"])

    assert result.exit_code == 0, result.output
    warnings = [line for line in result.stderr.splitlines() if line.startswith("Warning")]
    assert len(warnings) == 1
    assert warnings[0].startswith("Warning: Discovery: _inference._tcp.llava.torchmoor.svc")


def test_the_configuration_asks_for_what_the_service_publishes(overlay: Overlay) -> None:
    """The SRV record's name consists of the port, service and namespace, and the probe port (named side) matches."""
    content = yaml.safe_load(overlay.find_generated("ConfigMap", "torchmoor")["data"]["torchmoor.yaml"])
    (entry,) = content["Discovery"]
    port, protocol, service, namespace, rest = entry["dns_name"].split(".", 4)

    ports = {each["name"]: each for each in overlay.get("Service", service)["spec"]["ports"]}

    assert (namespace, rest) == (overlay.get("Service", service)["metadata"]["namespace"], "svc.cluster.local")
    assert protocol == "_tcp"
    assert ports[port.removeprefix("_")]["port"] == 8085
    assert ports["side"]["port"] == entry["management_port"]
    assert overlay.workload("llava").spec["serviceName"] == service


def test_urls_name_the_service(demo: Overlay) -> None:
    """Instances and proxies use the Service's DNS name for Valkey."""
    service = demo.get("Service", "valkey")
    for url in Secrets(demo)["valkey-urls"].values():
        parts = urlsplit(url)
        assert parts.hostname == f"valkey.{service['metadata']['namespace']}.svc.cluster.local"
        assert parts.port == service["spec"]["ports"][0]["port"]


def local(url: str, port: int) -> str:
    return re.sub(r"@[^/]+/", f"@127.0.0.1:{port}/", url)


def test_a_journal_works_with_its_user_s_rights(demo: Overlay, valkey: int) -> None:
    """A user without administrative rights can run all operations of a session."""
    url = local(Secrets(demo)["valkey-urls"]["journal"], valkey)
    journal = open_journal(JournalSettings(url=url), 60)
    event = Event(kind="open")

    journal.append(SESSION, 0, event, ANYONE)
    image = journal.put_image(SESSION, b"picture", ANYONE)

    assert journal.read(SESSION) == [event]
    assert journal.get_image(SESSION, image) == b"picture"
    assert journal.claim("name", SESSION) == SESSION
    journal.close(SESSION, Event(kind="close"))
    journal.sweep(int(time.time()), is_full=True)
    journal.delete(SESSION)


def test_a_queue_works_with_its_user_s_rights(demo: Overlay, valkey: int) -> None:
    """The proxies' user can run all operations of the queue."""
    url = local(Secrets(demo)["valkey-urls"]["queue"], valkey)

    async def live() -> None:
        queue = open_queue(url, AsyncQueueSettings())
        try:
            await queue.submit(REQUEST)
            assert (await queue.backlog("llava")).waiting == 1
            claim = await queue.claim("llava", 5.0)
            assert claim is not None
            assert await queue.extend(claim, 5.0)
            assert await queue.retry(claim, 0.0, "busy")
            assert await queue.cancel(REQUEST.inference_id) is not None
            assert len(await queue.list("llava")) == 1
            await queue.forget()
        finally:
            await queue.close()

    asyncio.run(live())


def test_nobody_else_gets_in(demo: Overlay, valkey: int) -> None:
    """Valkey requires a password; the probes' user cannot read data, and the clients' user cannot administer."""
    with redis.Redis(port=valkey, protocol=2) as nobody, pytest.raises(redis.AuthenticationError):
        nobody.get("a")
    probe = redis.Redis(port=valkey, username="probe", password="probe", protocol=2)
    with probe, pytest.raises(redis.exceptions.NoPermissionError):
        probe.get("a")
    user = urlsplit(local(Secrets(demo)["valkey-urls"]["journal"], valkey))
    with redis.Redis(port=valkey, username=user.username, password=user.password, protocol=2) as client:
        for command in ("FLUSHALL", "CONFIG GET *", "SHUTDOWN", "ACL LIST"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())


def test_the_probe_s_command_tells_whether_the_server_serves(demo: Overlay, valkey: int, tmp_path: Path) -> None:
    """The manifest's probe command works with Debian's client instead of Valkey's."""
    client = shutil.which("valkey-cli")
    if client is None:
        require("redis-cli")
    script = tmp_path / "valkey-cli"
    script.write_text(f'#!/bin/sh\nexec {client or "redis-cli"} -p "$PORT" "$@"\n')
    script.chmod(0o755)
    (container,) = demo.workload("valkey").containers
    command = container["livenessProbe"]["exec"]["command"]

    def run(port: int) -> int:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PORT": str(port)}
        return subprocess.run(command, env=environment, capture_output=True, timeout=30).returncode

    assert run(valkey) == 0
    assert run(1) != 0


@pytest.mark.parametrize("script", ["kubernetes/components/secrets/make_secrets.sh", "compose/make_env.sh"])
def test_folder_that_cannot_be_made_is_not_said_to_exist(script: str, tmp_path: Path) -> None:
    """If a checkout is not writable, the error is mkdir's own."""
    mkdir = tmp_path / "mkdir"
    mkdir.write_text("#!/bin/sh\necho 'mkdir: Read-only file system' >&2\nexit 1\n")
    mkdir.chmod(0o755)
    copy = shutil.copy(DEPLOY / script, tmp_path)

    done = subprocess.run(
        [copy], capture_output=True, text=True, timeout=30, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    )

    assert (done.returncode, done.stderr) == (1, "mkdir: Read-only file system\n")


@pytest.mark.parametrize("script", ["kubernetes/components/secrets/make_secrets.sh", "compose/make_env.sh"])
def test_with_arguments_nothing_is_written(script: str, tmp_path: Path) -> None:
    """With any argument, such as `--help`, the script prints its usage and writes nothing."""
    copy = shutil.copy(DEPLOY / script, tmp_path)

    done = subprocess.run([copy, "--help"], capture_output=True, text=True, timeout=30)

    assert done.returncode == 2
    assert done.stderr.startswith("Write new ")
    assert [path.name for path in tmp_path.iterdir()] == [Path(script).name]


def test_an_environment_that_exists_is_kept(tmp_path: Path) -> None:
    """Compose reads `.env`, so a user may have set an image or a port in it before."""
    copy = shutil.copy(DEPLOY / "compose" / "make_env.sh", tmp_path)
    (tmp_path / ".env").write_text("TORCHMOOR_PORT=8081\n")

    done = subprocess.run([copy], capture_output=True, text=True, timeout=30)

    assert (done.returncode, done.stderr) == (1, f"{tmp_path}/.env exists: remove it first to make new keys\n")
    assert (tmp_path / ".env").read_text() == "TORCHMOOR_PORT=8081\n"
    assert not (tmp_path / "generated").exists()
