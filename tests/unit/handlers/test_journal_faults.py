"""Journals whose store hangs, dies, is full, loses responses or refuses; and URLs, whose passwords stay secret."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.exceptions
import pytest
import redis.exceptions

from handlers.errors import SettingsError
from handlers.journal import directory, redis_connection, s3_objects
from handlers.journal import s3 as s3_journal
from handlers.journal.bounded import BoundedJournal
from handlers.journal.directory import DirectoryJournal
from handlers.journal.event import Event
from handlers.journal.journal import ANYONE, EventsMissing, EventTaken, Journal
from handlers.journal.redis import RedisJournal
from handlers.journal.redis_connection import RedisConnection
from handlers.journal.s3 import S3Journal
from handlers.journal.s3_objects import MAX_CONFLICTS
from handlers.journal.url import open_journal
from handlers.settings.journal import JournalSettings
from tests.http_servers import QuietHandler, serve_http
from tests.servers import BUCKET, LossyProxy, RedisServer, S3Server, run_redis, run_silent_server
from tests.unit.handlers.journal_stores import CLOSE
from tests.waiting import wait_until
from torchmoor.wire.store_urls import read_redis_address

PASSWORD = "S3cr3t"


def opened(url: str, **limits: Any) -> Journal:
    journal = open_journal(JournalSettings(url=url, **limits), tombstone_s=3600)
    assert journal is not None
    return journal


def new_id(nonce: str = "a") -> str:
    return f"ts-seq-{nonce * 16}-{int(time.time()) + 3600:08x}-llava-0-k0{'a' * 26}"


class StuckJournal(DirectoryJournal):
    """A directory that blocks reads and sweeps like a hard NFS mount, until the server is back."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, JournalSettings())
        self.is_back = threading.Event()
        self.num_waiting = threading.Semaphore(0)

    def read(self, session_id: str, start: int = 0, max_events: int | None = None) -> list[Event]:
        self.num_waiting.release()
        assert self.is_back.wait(30)
        return super().read(session_id, start, max_events)

    def sweep(self, expired_before: int, *, is_full: bool = True) -> None:
        self.num_waiting.release()
        assert self.is_back.wait(30)


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[StuckJournal]:
    journal = StuckJournal(tmp_path / "journal")
    yield journal
    journal.is_back.set()


# A store that hangs


def test_an_operation_that_hangs_times_out(stuck: StuckJournal) -> None:
    """An operation on a store that hangs times out, and works again once the store is back."""
    journal = BoundedJournal(stuck, timeout_s=0.05, max_in_flight=8)

    with pytest.raises(TimeoutError):
        journal.read(new_id())
    assert repr(journal) == "<BoundedJournal stalled 1/8 in flight>"
    journal.timeout_s = 30.0
    stuck.is_back.set()

    assert journal.read(new_id()) == []
    assert repr(journal).startswith("<BoundedJournal answering")


def test_a_store_that_hangs_holds_one_thread(stuck: StuckJournal) -> None:
    """After a time-out a single operation probes the store, and others are refused without waiting."""
    journal = BoundedJournal(stuck, timeout_s=0.05, max_in_flight=8)
    with pytest.raises(TimeoutError):
        journal.read(new_id())
    journal.timeout_s = 30.0
    with ThreadPoolExecutor(1) as other:
        trial = other.submit(journal.read, new_id())
        for _ in range(2):
            assert stuck.num_waiting.acquire(timeout=20)

        for _ in range(5):
            with pytest.raises(BlockingIOError):
                journal.append(new_id(), 0, Event(kind="open"), ANYONE)
        stuck.is_back.set()

        assert trial.result(20) == []
    journal.append(new_id(), 0, Event(kind="open"), ANYONE)


def test_operations_that_were_given_up_are_bounded(stuck: StuckJournal) -> None:
    """The number of abandoned operations, whose threads cannot be ended, is limited; beyond it operations fail."""
    journal = BoundedJournal(stuck, timeout_s=0.02, max_in_flight=3)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            journal.read(new_id())

    with pytest.raises(BlockingIOError, match="3 operations"):
        journal.read(new_id())


def test_an_error_is_no_time_out(tmp_path: Path) -> None:
    """After an error response, all operations still reach the store."""
    sid = new_id()
    journal = BoundedJournal(DirectoryJournal(tmp_path, JournalSettings()), timeout_s=30, max_in_flight=8)
    journal.append(sid, 0, Event(kind="open"), ANYONE)

    with pytest.raises(EventTaken):
        journal.append(sid, 0, Event(kind="open"), ANYONE)

    assert repr(journal).startswith("<BoundedJournal answering")


def test_a_long_sweep_goes_on_by_itself(stuck: StuckJournal) -> None:
    """A sweep may exceed the time-out of a turn; one runs at a time, and turns continue."""
    journal = BoundedJournal(stuck, timeout_s=0.02, max_in_flight=8)

    for _ in range(3):
        journal.sweep(0, is_full=True)

    assert stuck.num_waiting.acquire(timeout=20)
    assert not stuck.num_waiting.acquire(blocking=False)
    journal.timeout_s = 30.0
    journal.append(new_id(), 0, Event(kind="open"), ANYONE)


def test_a_long_sweep_that_fails_is_logged(
    stuck: StuckJournal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Operators read why expired sessions are not deleted, also if a sweep fails after its time-out."""

    def sweep(expired_before: int, *, is_full: bool) -> None:
        assert stuck.is_back.wait(30)
        raise OSError("the journal's store did not delete an object (AccessDenied)")

    monkeypatch.setattr(stuck, "sweep", sweep)
    journal = BoundedJournal(stuck, timeout_s=0.02, max_in_flight=8)

    journal.sweep(0, is_full=True)
    stuck.is_back.set()

    wait_until(lambda: "AccessDenied" in caplog.text, "the failure is logged")


@pytest.mark.parametrize("scheme", ["redis", "s3"])
def test_a_server_that_says_nothing_times_out(scheme: str, monkeypatch: pytest.MonkeyPatch, make_client: Any) -> None:
    """All operations time out, and a client of the worker gets an error that suggests a retry."""
    with run_silent_server() as port:
        set_aws(monkeypatch, port)
        url = f"redis://127.0.0.1:{port}/0" if scheme == "redis" else "s3://bucket"
        journal = opened(url, connect_timeout_s=0.2, timeout_s=0.2)

        for action in actions(journal):
            with pytest.raises(TimeoutError):
                action()
        client = make_client(journal=journal)
        refused = client.call({"requestType": "NEW_SESSION"})
        status = client.call(None, {"x-torchmoor-operation": "status"}).json

    assert (refused.status, refused.error) == (503, "JournalUnavailable")
    assert status["journal"]["failures"] > 0


@pytest.mark.parametrize("scheme", ["redis", "s3"])
def test_a_server_that_is_not_there_is_unavailable(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening makes no connection, so the worker starts; each operation fails until the server is there."""
    with run_silent_server() as port:
        pass
    set_aws(monkeypatch, port)
    journal = opened(f"redis://127.0.0.1:{port}" if scheme == "redis" else "s3://bucket")

    for action in actions(journal):
        with pytest.raises(OSError, match="cannot be reached"):
            action()


def actions(journal: Journal) -> list[Callable[[], object]]:
    return [
        lambda: journal.append(new_id(), 0, Event(kind="open"), ANYONE),
        lambda: journal.read(new_id()),
        lambda: journal.put_image(new_id(), b"png", ANYONE),
        lambda: journal.get_image(new_id(), "0" * 64),
        lambda: journal.close(new_id(), CLOSE),
        lambda: journal.delete(new_id()),
        lambda: journal.claim("a", "b"),
    ]


def set_aws(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PASSWORD)
    monkeypatch.setenv("AWS_REGION", "us-east-1")


# A store that dies, is full, or loses data


@pytest.mark.redis
def test_what_valkey_acknowledged_survives_its_death(tmp_path: Path) -> None:
    """After kill -9 during appends and a restart, every acknowledged event is there.

    The appends fail with an OSError. The last one may be recorded; writing it again is not a conflict.
    """
    with run_redis(tmp_path) as server:
        journal, sid = opened(server.url), new_id()
        events: list[Event] = []

        def append_for_ever() -> None:
            while True:
                events.append(Event(kind="turn", answer=str(len(events))))
                journal.append(sid, len(events) - 1, events[-1], ANYONE)

        killing = threading.Timer(0.2, server.kill)
        killing.start()
        with pytest.raises(OSError, match="cannot be reached"):
            append_for_ever()
        killing.join()
        with pytest.raises(OSError, match="cannot be reached"):
            journal.read(sid)
        server.start()

        journal.append(sid, len(events) - 1, events[-1], ANYONE)

        assert journal.read(sid) == events


@pytest.mark.redis
def test_events_that_valkey_has_lost_are_missed(redis_server: RedisServer) -> None:
    """A session with lost events is an error and does not continue partially."""
    journal, sid = opened(redis_server.url), new_id()
    for number in range(3):
        journal.append(sid, number, Event(kind="turn"), ANYONE)
    with redis_server.client() as client:
        client.ltrim(f"torchmoor:{{{sid}}}:events", 0, 1)

    with pytest.raises(EventsMissing, match="missing"):
        journal.append(sid, 3, Event(kind="turn"), ANYONE)
    with pytest.raises(EventsMissing, match="missing"):  # so that no answer is computed that cannot be recorded
        journal.read(sid, 3)
    assert journal.read(sid, 2) == []


@pytest.mark.redis
def test_a_sweep_does_not_take_the_connection_of_an_operation(redis_server: RedisServer) -> None:
    """With as many operations in flight as the settings allow, the sweep has a connection of its own."""
    address = read_redis_address(urlsplit(redis_server.url))
    assert address is not None
    client = redis_connection.connect(address, JournalSettings(max_in_flight=2))
    held = [client.connection_pool.get_connection() for _ in range(2)]

    assert RedisConnection(client).run("return 1", []) == 1
    for connection in held:
        client.connection_pool.release(connection)
    client.close()


@pytest.mark.redis
def test_a_full_valkey_refuses_and_goes_on_later(redis_server: RedisServer) -> None:
    """Existing data stays; a write that does not fit is not acknowledged, and the error does not quote it."""
    journal, sid = opened(redis_server.url), new_id("b")
    journal.append(sid, 0, Event(kind="open"), ANYONE)
    with redis_server.client() as client:
        client.config_set("maxmemory", "1")
        try:
            with pytest.raises(OSError, match=r"refused a command \(OutOfMemoryError\)$"):
                journal.append(sid, 1, Event(kind="turn", question="secret"), ANYONE)
            assert len(journal.read(sid)) == 1
        finally:
            client.config_set("maxmemory", "0")

    journal.append(sid, 1, Event(kind="turn"), ANYONE)


@pytest.mark.redis
def test_the_keys_of_a_session_expire(redis_server: RedisServer) -> None:
    """Content expires within a minute of the session, the marker of a closed one later; Valkey needs no sweep."""
    journal, sid = opened(redis_server.url), new_id("c")
    expires_at = int(sid.split("-")[3], 16)
    journal.append(sid, 0, Event(kind="open"), ANYONE)
    image = journal.put_image(sid, b"png of c", ANYONE)
    shared = [f"torchmoor:{{anyone}}:{name}:{image}" for name in ("picture", "sessions")]

    with redis_server.client() as client:
        names = [f"torchmoor:{{{sid}}}:{name}" for name in ("events", "pictures", "account")]
        kept = {client.expiretime(name) for name in (*names, *shared)}
        journal.close(sid, CLOSE)
        closed_until = client.expiretime(f"torchmoor:{{{sid}}}:closed")
        left = client.exists(*names) + client.exists(*shared)

    assert (kept, closed_until, left) == ({expires_at + 30}, expires_at + 3600, 0)


@pytest.mark.redis
def test_a_turn_that_outlives_its_session_is_not_an_error(redis_server: RedisServer) -> None:
    """A turn that ends after its session's keys have expired is answered and not recorded."""
    journal, sid = opened(redis_server.url), f"ts-seq-{'d' * 16}-{int(time.time()) - 31:08x}-llava-0-k0{'a' * 26}"

    journal.append(sid, 3, Event(kind="turn"), ANYONE)

    with redis_server.client() as client:
        assert client.exists(f"torchmoor:{{{sid}}}:events") == 0
    with pytest.raises(OSError, match="missing"):
        journal.append(new_id("d"), 3, Event(kind="turn"), ANYONE)


@pytest.mark.redis
def test_an_answer_of_valkey_that_is_lost(redis_server: RedisServer) -> None:
    """A writer that repeats its event after a lost response gets no conflict."""
    with LossyProxy(redis_server.port) as proxy:
        url = redis_server.url.replace(str(redis_server.port), str(proxy.port))
        check_lost_answer(opened(url), proxy)


@pytest.mark.s3
def test_an_answer_of_s3_that_is_lost(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers the repeated write with 412, which is not a conflict, because the event is the writer's own."""
    s3_server.use_in(monkeypatch)
    with LossyProxy(s3_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{proxy.port}")
        check_lost_answer(opened(f"s3://{BUCKET}/lossy"), proxy)


def check_lost_answer(journal: Journal, proxy: LossyProxy) -> None:
    sid = new_id("d")
    journal.delete(sid)
    journal.append(sid, 0, Event(kind="open"), ANYONE)
    proxy.is_losing.set()

    journal.append(sid, 1, Event(kind="turn", answer="mine"), ANYONE)

    assert proxy.num_lost == 1
    assert [event.answer for event in journal.read(sid)] == ["", "mine"]
    with pytest.raises(EventTaken):
        journal.append(sid, 1, Event(kind="turn", answer="mine"), ANYONE)


class FailingLookUps:
    """DNS look-ups, of which the next num_failing fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_failing = 1
        self._look_up = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._run)

    def _run(self, *arguments: Any, **options: Any) -> Any:
        if self.num_failing:
            self.num_failing -= 1
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._look_up(*arguments, **options)


@pytest.mark.redis
def test_one_failed_look_up_of_valkeys_name_is_retried(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal retries one failed DNS look-up of Valkey's name; a second failure is an error."""
    journal, sid = opened(redis_server.url), new_id("f")
    names = FailingLookUps(monkeypatch)

    journal.append(sid, 0, Event(kind="open"), ANYONE)

    assert names.num_failing == 0
    names.num_failing = 2
    with pytest.raises(OSError, match="cannot be reached"):
        opened(redis_server.url).append(sid, 1, Event(kind="turn"), ANYONE)


@pytest.mark.s3
def test_one_failed_look_up_of_s3s_name_is_retried(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is written although one DNS look-up of S3's name fails."""
    s3_server.use_in(monkeypatch)
    journal, sid = opened(f"s3://{BUCKET}/look-up"), new_id("f")
    names = FailingLookUps(monkeypatch)

    journal.append(sid, 0, Event(kind="open"), ANYONE)

    assert names.num_failing == 0
    assert [event.kind for event in journal.read(sid)] == ["open"]


@pytest.mark.redis
def test_a_primary_that_became_a_replica_is_left(tmp_path: Path) -> None:
    """A replica refuses writes on open connections, so they are closed, and new ones follow the address."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    with run_redis(tmp_path / "old") as old, run_redis(tmp_path / "new") as new, LossyProxy(old.port) as proxy:
        journal = opened(old.url.replace(str(old.port), str(proxy.port)))
        journal.append(new_id(), 0, Event(kind="open"), ANYONE)
        with old.client() as client:
            # of a host without a server, so that no copy of a primary's data interferes
            client.replicaof("127.0.0.1", "1")
        proxy.target_port = new.port

        with pytest.raises(OSError, match="ReadOnly"):
            journal.append(new_id("b"), 0, Event(kind="open"), ANYONE)

        journal.append(new_id("b"), 0, Event(kind="open"), ANYONE)


class Conflicting(QuietHandler):
    """An S3 that answers as if another conditional write of the same key were in progress."""

    num_conflicts = 0  # how many more

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if type(self).num_conflicts > 0:
            type(self).num_conflicts -= 1
            self.reply(409, b"<Error><Code>ConditionalRequestConflict</Code><Message>again</Message></Error>")
        else:
            self.reply(200)


def test_a_conditional_write_that_conflicts_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers 409 while another write of the key is undecided; the write is repeated a limited number of times."""
    with serve_http(Conflicting) as url:
        set_aws(monkeypatch, int(url.rpartition(":")[2]))
        journal = opened("s3://bucket")

        Conflicting.num_conflicts = 2
        journal.append(new_id(), 0, Event(kind="open"), ANYONE)
        assert Conflicting.num_conflicts == 0
        Conflicting.num_conflicts = MAX_CONFLICTS + 5
        with pytest.raises(OSError, match="ConditionalRequestConflict"):
            journal.append(new_id(), 0, Event(kind="open"), ANYONE)

        assert Conflicting.num_conflicts == 4


@pytest.mark.s3
def test_a_bucket_that_is_not_there_is_no_empty_journal(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing bucket is an error and does not make sessions look lost."""
    s3_server.use_in(monkeypatch)

    with pytest.raises(OSError, match="NoSuchBucket"):
        opened("s3://no-such-bucket").read(new_id())


class FailingClient:
    """A client of either library whose every call raises an error."""

    def __init__(self, error: Exception) -> None:
        self.connection_pool = self
        self._error = error

    def disconnect(self) -> None: ...

    def eval(self, *args: Any) -> None:
        raise self._error

    def put_object(self, **fields: Any) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("make", "library", "base"),
    [
        (
            lambda client: RedisJournal(RedisConnection(client), 3600, JournalSettings()),
            redis.exceptions,
            redis.exceptions.RedisError,
        ),
        (
            lambda client: S3Journal(client, BUCKET, "", JournalSettings()),
            botocore.exceptions,
            botocore.exceptions.BotoCoreError,
        ),
    ],
    ids=["redis", "botocore"],
)
def test_every_error_of_the_library_becomes_an_os_error(make: Any, library: Any, base: Any) -> None:
    """Callers of a journal need to handle OSError only."""
    errors = [kind for kind in vars(library).values() if isinstance(kind, type) and issubclass(kind, base)]
    assert len(errors) > 20

    for kind in errors:
        with pytest.raises(OSError, match="journal"):
            make(FailingClient(kind.__new__(kind))).append(new_id(), 0, Event(kind="open"), ANYONE)


# Sweeps


@pytest.mark.s3
def test_a_sweep_of_s3_is_bounded(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep stops after some pages and at the first live session; the next one continues there.

    Claims expire by their age, wherever they are in the listing.
    """
    s3_server.use_in(monkeypatch)
    monkeypatch.setattr(s3_objects, "PAGE", 2)
    monkeypatch.setattr(s3_journal, "MAX_SWEPT_PAGES", 2)
    journal, now = opened(f"s3://{BUCKET}/sweep", claim_s=100), int(time.time())
    for letter in "abcdefg":
        journal.append(f"ts-seq-{letter * 16}-{now - 10:08x}-llava-0-k0aa", 0, Event(kind="open"), ANYONE)
        journal.claim(letter, letter)
    journal.append(new_id("z"), 0, Event(kind="open"), ANYONE)

    def left(folder: str) -> int:
        found = s3_server.client().list_objects_v2(Bucket=BUCKET, Prefix=f"sweep/{folder}/")
        return len(found.get("Contents", []))

    counts = []
    for later in (0, 0, 0, 200, 200):
        journal.sweep(now + later, is_full=True)
        counts.append((left("sessions"), left("claims")))

    assert counts == [(4, 7), (1, 7), (1, 7), (1, 4), (1, 0)]  # the fourth began where the third had stopped
    journal.delete(new_id("z"))


def test_a_sweep_of_a_directory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep visits a limited number of folders and claims, and leaves other files alone."""
    monkeypatch.setattr(directory, "MAX_SWEPT", 3)
    journal, now = DirectoryJournal(tmp_path, JournalSettings(claim_s=100)), int(time.time())
    for letter in "abcde":
        journal.append(f"ts-seq-{letter * 16}-{now - 10:08x}-llava-0-k0aa", 0, Event(kind="open"), ANYONE)
        journal.claim(letter, letter)
    (tmp_path / "lost+found").mkdir()

    counts = []
    for _ in range(4):
        journal.sweep(now + 200, is_full=True)
        counts.append((len(list(tmp_path.glob("ts-seq-*"))), len(list((tmp_path / "claims").iterdir()))))

    assert counts == [(2, 5), (0, 4), (0, 1), (0, 0)]
    assert (tmp_path / "lost+found").is_dir()


# Costs


@pytest.mark.redis
def test_a_turn_costs_two_commands_of_valkey(redis_server: RedisServer) -> None:
    """A turn needs one command to check for news and one to write; so does taking over a session of any length."""
    journal, sid = opened(redis_server.url), new_id("e")
    for number in range(30):
        journal.append(sid, number, Event(kind="turn"), ANYONE)

    with redis_server.client() as client:
        client.config_resetstat()
        journal.read(sid, 30)
        journal.append(sid, 30, Event(kind="turn"), ANYONE)
        journal.read(sid)

        assert client.info("commandstats")["cmdstat_eval"]["calls"] == 3


@pytest.mark.s3
def test_a_turn_costs_two_requests_of_s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn needs one GET and one PUT; reading 30 events takes five round trips: one, then eight at a time."""
    s3_server.use_in(monkeypatch)
    client = s3_objects.connect(JournalSettings())
    journal = S3Journal(client, BUCKET, "cost/", JournalSettings())
    sid, sent = new_id("f"), []
    client.meta.events.register("before-send.s3", lambda request, **_: sent.append(request.method))
    journal.append(sid, 0, Event(kind="open"), ANYONE)
    assert sent == ["PUT"]
    sent.clear()

    journal.read(sid, 1)
    journal.append(sid, 1, Event(kind="turn"), ANYONE)
    assert sent == ["GET", "PUT"]
    for number in range(2, 30):
        journal.append(sid, number, Event(kind="turn"), ANYONE)
    sent.clear()
    journal.read(sid)

    assert sent == ["GET"] * (1 + 4 * 8)


# URLs


@pytest.mark.parametrize(
    "url",
    [
        *("", "on", "http://x/y", "file://host/x", "file:relative", "file:///tmp/x?y", "file:///tmp/x#y"),
        *(
            "redis://",
            "redis:///0",
            "redis://host/one",
            "redis://host:port/0",
            "redis://host/0?db=1",
            "redis://host/-1",
        ),
        *("s3://", "s3:///prefix", "s3:bucket", "s3://bucket:80/x", "rediss//host"),
        *(f"redis://user:{PASSWORD}#x@host/0", f"redis://user:{PASSWORD}/x@host/0", f"redis://user:x[{PASSWORD}@host"),
        *(f"s3://key:{PASSWORD}@bucket", f"http://user:{PASSWORD}@host", f"file://user:{PASSWORD}@host/x"),
    ],
)
def test_urls_that_name_no_journal_are_refused(url: str) -> None:
    """A misspelt journal is an error instead of none, and the log omits its password."""
    with pytest.raises(SettingsError, match=r"handler\.journal\.url") as refused:
        open_journal(JournalSettings(url=url), tombstone_s=3600)

    assert PASSWORD not in str(refused.value)
    assert refused.value.__suppress_context__ or PASSWORD not in str(refused.value.__context__)


def test_a_directory_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    """An unusable directory is a configuration error, so that the worker does not restart repeatedly."""
    (tmp_path / "file").touch()

    for url in ((tmp_path / "file" / "journal").as_uri(), "file:///tmp/%00"):
        with pytest.raises(SettingsError, match="cannot be used"):
            opened(url)


def test_a_url_in_s3_may_have_its_scheme_in_capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme in capitals is accepted, as in every other URL; the prefix may be percent-encoded."""
    places: list[tuple[str, str]] = []
    monkeypatch.setattr("handlers.journal.s3.S3Journal", lambda client, *place: places.append(place[:2]))

    for url in ("s3://bucket/a%20prefix/", "S3://bucket/a%20prefix"):
        opened(url)

    assert places == [("bucket", "a prefix/")] * 2


def test_off_is_no_journal() -> None:
    assert open_journal(JournalSettings(), tombstone_s=3600) is None


@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys"])
def test_redis_and_valkey_are_the_same(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme that ends with s uses TLS and verifies the server's certificate."""
    clients: list[Any] = []
    monkeypatch.setattr(redis_connection, "RedisConnection", lambda client: clients.append(client))
    opened(f"{scheme}://user:p%40ss@[::1]:7000/3")
    pool = clients[0].connection_pool
    connection = pool.connection_class(**pool.connection_kwargs)

    assert isinstance(connection, redis.SSLConnection) == (scheme in ("rediss", "valkeys"))
    assert connection.host == "::1"
    assert (connection.port, connection.db, connection.username, connection.password) == (7000, 3, "user", "p@ss")
    if isinstance(connection, redis.SSLConnection):
        assert (connection.cert_reqs.name, connection.check_hostname) == ("CERT_REQUIRED", True)


@pytest.mark.redis
def test_a_wrong_password_is_told_without_it(redis_server: RedisServer, caplog: Any, make_client: Any) -> None:
    """The password appears neither in the error, nor in a log line, nor in the settings' text."""
    url = f"redis://journal:{PASSWORD}@{redis_server.address}/0"
    caplog.set_level(logging.DEBUG)

    with pytest.raises(OSError, match=r"Auth") as refused:
        opened(url).read(new_id())
    client = make_client(journal=opened(url))
    told = client.call({"requestType": "NEW_SESSION"})

    assert told.error == "JournalUnavailable"
    assert "journal failed" in caplog.text
    for text in (str(refused.value), caplog.text, told.body.decode(), repr(JournalSettings(url=url))):
        assert PASSWORD not in text
