"""The cost of operations and sweeps of a journal in S3, and how they share its threads and requests."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from handlers.journal import s3 as s3_journal
from handlers.journal import s3_objects
from handlers.journal.event import Event
from handlers.journal.journal import owner_key
from handlers.journal.s3 import S3Journal
from handlers.journal.s3_objects import S3Objects
from handlers.settings.journal import JournalSettings
from tests.servers import BUCKET, S3Server
from tests.unit.handlers.journal_stores import CLOSE, new_id, turn
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.s3
ALICE = owner_key("llava", "alice")
PICTURE = b"a picture"


class Bucket:
    """A journal in a bucket, the test's own client, and the number of names that the journal's listings returned."""

    def __init__(self, server: S3Server) -> None:
        self.prefix = f"{uuid4().hex}/"
        self.own = server.client()
        self.client = s3_objects.connect(JournalSettings())
        self.journal = S3Journal(self.client, BUCKET, self.prefix, JournalSettings())
        self.num_listed = 0
        self.client.meta.events.register("after-call.s3.ListObjectsV2", self._note)

    def _note(self, parsed: Any, **_: Any) -> None:
        self.num_listed += len(parsed.get("Contents", ()))

    def count(self, action: Callable[[], object]) -> int:
        """Return how many names are listed by the action."""
        self.num_listed = 0
        action()
        return self.num_listed

    def open_session(self, *pictures: bytes, lives_s: int = 3600) -> str:
        sid = new_id(lives_s)
        names = tuple(self.journal.put_image(sid, data, ALICE) for data in pictures)
        self.journal.append(sid, 0, Event(kind="open", images=names), ALICE)
        return sid


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    s3_server.use_in(monkeypatch)
    return Bucket(s3_server)


def test_credentials_that_are_found_later_are_used(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker that finds no credentials at its start, as if a metadata service were slow, finds them later."""
    s3_server.use_in(monkeypatch)
    with monkeypatch.context() as without:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            without.delenv(name, raising=False)
        without.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        without.setenv("AWS_EC2_METADATA_DISABLED", "true")
        bucket = Bucket(s3_server)
        with pytest.raises(OSError, match=r"NoCredentialsError.*set AWS_ACCESS_KEY_ID"):
            bucket.open_session()

    assert bucket.journal.read(bucket.open_session())[0].kind == "open"


def test_an_object_that_cannot_be_deleted_stops_no_count(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store keeps an expired session, such as by a lock, the others are measured, and it counts no longer."""
    bucket.open_session(lives_s=100)
    lasting = bucket.open_session()

    def refuse(objects: S3Objects, keys: Any) -> None:
        if keys:
            raise OSError("the store did not delete an object (AccessDenied)")

    monkeypatch.setattr(S3Objects, "delete", refuse)
    other = S3Journal(bucket.client, BUCKET, bucket.prefix, JournalSettings())
    for journal in (bucket.journal, other):
        with pytest.raises(OSError, match="AccessDenied"):
            journal.sweep(int(time.time()) + 200, is_full=True)
        with pytest.raises(OSError, match="AccessDenied"):
            journal.sweep(int(time.time()) + 220, is_full=False)

    assert (bucket.journal.num_sessions, other.num_sessions) == (1, 1)
    monkeypatch.undo()
    other.delete(lasting)


def test_an_opening_costs_the_same_after_many_releases(bucket: Bucket) -> None:
    """Closes of sessions with an image leave marks for an hour.

    An opening costs the same because it does not list them.
    """

    def come_and_go() -> None:
        bucket.journal.close(bucket.open_session(PICTURE), CLOSE)

    for _ in range(2):
        come_and_go()
    counts = [bucket.count(come_and_go) for _ in range(6)]

    assert counts == [counts[0]] * 6
    sid = bucket.open_session(PICTURE)
    assert bucket.count(lambda: bucket.open_session(PICTURE)) == 2  # the image and the last mark
    assert bucket.journal.get_image(sid, bucket.journal.read(sid)[0].images[0]) == PICTURE


@pytest.mark.parametrize("folder", ["sessions", "uses", "pictures"])
def test_a_sweep_measures_a_part_of_the_store(bucket: Bucket, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep measures a limited part of the store, and the next sweeps continue there."""
    names = {
        "sessions": lambda number: f"sessions/ffffffff/other-{number:02d}/events/0",
        "uses": lambda number: f"uses/{ALICE}/{'a' * 64}/99999999/gone-{number:02d}",
        "pictures": lambda number: f"pictures/{ALICE}/{number:064x}/99999999.released",
    }
    for number in range(40):
        bucket.own.put_object(Bucket=BUCKET, Key=bucket.prefix + names[folder](number), Body=b"")
    sid = bucket.open_session(PICTURE)
    monkeypatch.setattr(s3_objects, "PAGE", 5)
    monkeypatch.setattr(s3_journal, "MAX_MEASURED", 10)

    counts = [bucket.count(lambda: bucket.journal.sweep(int(time.time()), is_full=True)) for _ in range(12)]

    assert max(counts) < 25
    assert bucket.journal.used_bytes >= len(PICTURE)
    assert bucket.journal.read(sid)[0].kind == "open"


def test_clients_do_not_wait_for_a_sweep(bucket: Bucket) -> None:
    """A sweep that releases many images at once, and waits for the store, leaves threads to a client's request."""
    for number in range(2 * s3_objects.PARALLEL):
        bucket.open_session(b"picture %d" % number, lives_s=600)
    sid = bucket.open_session()
    for number in range(1, 10):
        bucket.journal.append(sid, number, turn("what?"), ALICE)
    waiting, is_over = threading.Semaphore(0), threading.Event()

    def hang(request: Any, **_: Any) -> None:
        if request.url.endswith(".released") and request.method == "PUT":
            waiting.release()
            assert is_over.wait(DEADLINE_S)

    bucket.client.meta.events.register("before-send.s3.PutObject", hang)
    with ThreadPoolExecutor(2) as pool:
        sweep = pool.submit(bucket.journal.sweep, int(time.time()) + 700, is_full=False)
        try:
            for _ in range(s3_objects.PARALLEL):
                assert waiting.acquire(timeout=DEADLINE_S)
            reading = pool.submit(bucket.journal.read, sid)

            assert len(reading.result(DEADLINE_S)) == 10
        finally:
            is_over.set()
        sweep.result(DEADLINE_S)
