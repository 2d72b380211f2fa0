"""The stores of journals under test, each with direct access to the stored data."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from handlers.journal.event import Event
from handlers.journal.journal import Journal
from handlers.journal.url import open_journal
from handlers.settings.journal import JournalSettings
from tests.servers import BUCKET, RedisServer, S3Server

TOMBSTONE_S = 3600
PATIENT = {"timeout_s": 60.0}  # of one operation: a sweep that took longer would go on while the test looks
CLOSE = Event(kind="close")
HOURS_S = 10_000
KINDS = (
    "directory",
    pytest.param("valkey", marks=pytest.mark.redis),
    pytest.param("cluster", marks=[pytest.mark.redis, pytest.mark.slow]),  # the same scripts, with keys in one slot
    pytest.param("s3", marks=pytest.mark.s3),
)


@dataclass
class Store:
    """A journal, and the test's direct access to the stored data."""

    url: str
    journal: Journal
    dump: Callable[[], bytes]  # all stored contents and names, each content once
    pass_time: Callable[[int], object]  # advance by these seconds, for a store that uses the test's clock
    poison: Callable[[str, str, bytes], object]  # replace a session's first event, or the only image, by these bytes

    def reopened(self, **limits: Any) -> Journal:
        """Open the journal again, as another instance does."""
        journal = open_journal(JournalSettings(url=self.url, **PATIENT, **limits), TOMBSTONE_S)
        assert journal is not None
        return journal


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Yield an empty store; at the end, check that no operation is in progress."""
    pass_time: Callable[[int], object] = int  # nothing to do
    if request.param == "directory":
        url, dump = tmp_path.as_uri(), lambda: dump_folder(tmp_path)
        pass_time = partial(age_files, tmp_path)
        poison: Callable[[str, str, bytes], object] = partial(poison_folder, tmp_path)
    elif request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        server.use_in(monkeypatch)
        prefix = uuid4().hex
        url, dump = f"s3://{BUCKET}/{prefix}", lambda: dump_bucket(server, prefix)
        poison = partial(poison_bucket, server, prefix)
    else:
        name = {"valkey": "redis_server", "cluster": "redis_cluster"}[request.param]
        valkey: RedisServer = request.getfixturevalue(name)
        with valkey.client() as client:
            client.flushall()
        url, dump, pass_time = valkey.url, lambda: dump_keys(valkey), partial(age_keys, valkey)
        poison = partial(poison_keys, valkey)
    journal = open_journal(JournalSettings(url=url, **PATIENT), TOMBSTONE_S)
    assert journal is not None
    yield Store(url, journal, dump, pass_time, poison)
    assert repr(journal) == "<BoundedJournal answering 0/32 in flight>"


def dump_folder(folder: Path) -> bytes:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    contents = {path.stat().st_ino: path.read_bytes() for path in files}
    return b"\n".join([*(str(path.relative_to(folder)).encode() for path in files), *contents.values()])


def age_files(folder: Path, seconds: int) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            written_at = path.stat().st_mtime - seconds
            os.utime(path, (written_at, written_at))


def dump_bucket(server: S3Server, prefix: str) -> bytes:
    client = server.client()
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    bodies = {item["Key"]: client.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read() for item in found}
    return b"\n".join(key.encode() + b"\n" + body for key, body in bodies.items())


def dump_keys(server: RedisServer) -> bytes:
    with server.client() as client:
        read = {
            b"list": lambda key: b"\n".join(client.lrange(key, 0, -1)),
            b"hash": lambda key: b"\n".join(b"%b %b" % item for item in client.hgetall(key).items()),
            b"zset": lambda key: b"\n".join(client.zrange(key, 0, -1)),
            b"string": client.get,
            b"none": lambda key: b"",  # expired since it was listed
        }
        return b"\n".join(key + b"\n" + (read[client.type(key)](key) or b"") for key in client.scan_iter())


def age_keys(server: RedisServer, seconds: int) -> None:
    """Shorten the remaining life of each key that expires, as if this time had passed."""
    with server.client() as client:
        for key in dict.fromkeys(client.scan_iter()):
            if client.type(key) == b"zset":  # with times
                aged = {name: at - seconds for name, at in client.zrange(key, 0, -1, withscores=True)}
                if aged:
                    client.zadd(key, aged, xx=True)  # xx: an expiring key must not be created again
            left_ms = client.pttl(key)
            if left_ms > 0:
                client.pexpire(key, left_ms - 1000 * seconds)  # 0 or less deletes the key now


def poison_folder(folder: Path, sid: str, what: str, data: bytes) -> None:
    length = {"events": 8, "images": 64}[what]
    (path,) = (path for path in (folder / sid).iterdir() if len(path.name) == length)
    path.write_bytes(data)


def poison_bucket(server: S3Server, prefix: str, sid: str, what: str, data: bytes) -> None:
    client = server.client()
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    folder = f"{sid}/events/" if what == "events" else f"{prefix}/pictures/"
    (key,) = (item["Key"] for item in found if folder in item["Key"])
    client.put_object(Bucket=BUCKET, Key=key, Body=data)


def poison_keys(server: RedisServer, sid: str, what: str, data: bytes) -> None:
    with server.client() as client:
        if what == "events":
            client.lset(f"torchmoor:{{{sid}}}:events", 0, data)
        else:
            (key,) = client.keys("torchmoor:{*}:picture:*")
            client.set(key, data)


def new_id(lives_s: int = 3600) -> str:
    """Return an unused session id, which expires in `lives_s` seconds."""
    nonce = "".join(chr(97 + int(digit, 16)) for digit in uuid4().hex[:16])
    return f"ts-seq-{nonce}-{int(time.time()) + lives_s:08x}-llava-0-k0{'a' * 26}"


def turn(text: str) -> Event:
    return Event(kind="turn", question=text, answer=text)
