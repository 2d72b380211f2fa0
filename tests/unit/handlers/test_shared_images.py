"""Images in a journal: each once for all sessions of an owner, for as long as one of them is there."""

import errno
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from handlers.journal import redis_connection, s3_objects
from handlers.journal.directory import DirectoryJournal
from handlers.journal.event import Event, image_hash
from handlers.journal.journal import Journal, owner_key
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.journal_stores import CLOSE, HOURS_S, Store, new_id

ALICE, BOB = owner_key("llava", "alice"), owner_key("llava", "bob")


def new_picture() -> bytes:
    return uuid4().hex.encode() * 100


def open_session(journal: Journal, owner: str, *pictures: bytes, lives_s: int = 3600) -> str:
    """Record a session with these images as a worker does."""
    sid = new_id(lives_s)
    names = tuple(journal.put_image(sid, data, owner) for data in pictures)
    journal.append(sid, 0, Event(kind="open", images=names), owner)
    return sid


def test_an_image_is_stored_once_for_an_owner(store: Store) -> None:
    """An owner's sessions share an image, whichever instance opens them; another owner has a separate copy."""
    data = new_picture()
    sessions = [open_session(journal, ALICE, data) for journal in (store.journal, store.reopened(), store.journal)]
    other = open_session(store.journal, BOB, data)

    assert store.dump().count(data) == 2
    for sid in (*sessions, other):
        assert store.reopened().get_image(sid, image_hash(data)) == data


def test_an_image_goes_with_its_last_session(store: Store) -> None:
    """A close leaves an image to other sessions; the last close deletes it, and a later session stores it again."""
    data = new_picture()
    first, second, third = (open_session(store.journal, ALICE, data) for _ in range(3))

    store.journal.close(first, CLOSE)
    store.journal.delete(second)
    assert store.reopened().get_image(third, image_hash(data)) == data
    with pytest.raises(FileNotFoundError):
        store.journal.get_image(first, image_hash(data))
    store.reopened().close(third, CLOSE)
    store.journal.close(third, CLOSE)

    assert store.dump().count(data) == 0
    again = open_session(store.journal, ALICE, data)
    assert store.journal.get_image(again, image_hash(data)) == data
    assert store.dump().count(data) == 1


def test_an_image_outlives_the_session_that_brought_it(store: Store) -> None:
    """An image stays after its first session expires, and is deleted without a full sweep after the last one."""
    data, now = new_picture(), int(time.time())
    open_session(store.journal, ALICE, data, lives_s=600)
    longer = open_session(store.reopened(), ALICE, data, lives_s=7200)
    for journal in (journals := (store.journal, store.reopened())):
        journal.sweep(now, is_full=True)

    def pass_time(seconds: int, passed: int) -> None:
        store.pass_time(seconds)
        for journal in journals:
            journal.sweep(now + passed - 30, is_full=False)

    pass_time(700, 700)
    assert store.journal.get_image(longer, image_hash(data)) == data
    store.journal.sweep(now + 670, is_full=True)
    assert store.journal.get_image(longer, image_hash(data)) == data
    store.pass_time(7000)
    store.journal.sweep(now + 7670, is_full=True)

    assert store.dump().count(data) == 0


def test_sessions_with_one_image_come_and_go_at_once(store: Store) -> None:
    """During concurrent openings and closes on four instances, open sessions keep their image.

    At the end none is left.
    """
    data, journals = new_picture(), [store.reopened() for _ in range(4)]

    def come_and_go(journal: Journal) -> str:
        kept = open_session(journal, ALICE, data)
        for _ in range(5):
            before, kept = kept, open_session(journal, ALICE, data)
            journal.close(before, CLOSE)
            assert journal.get_image(kept, image_hash(data)) == data
        return kept

    with ThreadPoolExecutor(4) as pool:
        kept = list(pool.map(come_and_go, journals))
    assert 1 <= store.dump().count(data) <= 4
    for sid in kept:
        assert store.journal.get_image(sid, image_hash(data)) == data
        store.journal.close(sid, CLOSE)

    assert store.dump().count(data) == 0


def test_no_request_reads_what_other_sessions_have(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An opening, a turn and a close list names of the session itself and of its image only."""
    data, places = new_picture(), []

    def noting(list_names: Any, number: int) -> Any:
        def note(*arguments: Any, **options: Any) -> Any:
            places.append(str(arguments[number]))
            return list_names(*arguments, **options)

        return note

    others = [open_session(store.journal, ALICE, data) for _ in range(3)]
    for module, name, number in ((os, "listdir", 0), (os, "scandir", 0), (s3_objects, "list_objects", 2)):
        monkeypatch.setattr(module, name, noting(getattr(module, name), number))
    monkeypatch.setattr(redis_connection.RedisConnection, "scan", noting(redis_connection.RedisConnection.scan, 1))
    store.journal.check_room(ALICE)
    sid = open_session(store.journal, ALICE, data)
    store.journal.claim("an opening", sid)
    store.journal.append(sid, len(store.journal.read(sid)), Event(kind="turn"), ALICE)
    store.journal.get_image(sid, image_hash(data))
    store.journal.close(sid, CLOSE)

    assert [place for place in places if sid not in place and image_hash(data) not in place] == []
    assert not any(other in place for place in places for other in others)


def test_a_directory_on_a_file_system_with_few_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a file has reached its limit of links, the next session's image is a new file for later sessions."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    link, data = os.link, new_picture()

    def link_few(source: Any, *arguments: Any, **options: Any) -> None:
        if os.stat(source).st_nlink >= 3:
            raise OSError(errno.EMLINK, "Too many links")
        link(source, *arguments, **options)

    monkeypatch.setattr(os, "link", link_few)
    sessions = [open_session(journal, ALICE, data) for _ in range(6)]

    copies = {(tmp_path / sid / image_hash(data)).stat().st_ino for sid in sessions}
    assert len(copies) == 3
    for sid in sessions:
        assert journal.get_image(sid, image_hash(data)) == data
        journal.close(sid, CLOSE)
    assert list((tmp_path / "pictures").rglob("*.*")) == []


# Each line on the standard input starts one process, which is killed some steps later than the process before.
KILLED = """
import os, socket, sys
from handlers.journal.directory import DirectoryJournal
from handlers.journal.event import Event
from handlers.journal.url import open_journal
from handlers.settings.journal import JournalSettings

STEPS = {"os.link", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "send"}
url, owner, shared, stride, num_steps = *sys.argv[1:5], 0

def step(name, *_):
    global left
    if name in STEPS:
        left -= 1
        if left < 0:
            os._exit(9)

sendall = socket.socket.sendall
def counted(self, *arguments):
    step("send")
    return sendall(self, *arguments)

def run(old, new):
    global left
    left = 1 << 30
    sys.addaudithook(step)
    socket.socket.sendall = counted
    journal = open_journal(JournalSettings(url=url), 3600)
    journal.read(new)  # connects
    left = num_steps
    for data in (shared.encode(), new.encode()):
        journal.put_image(new, data, owner)
    journal.append(new, 0, Event(kind="open"), owner)
    journal.close(old, Event(kind="close"))
    os._exit(0)

print("ready", flush=True)
for line in sys.stdin:
    process = os.fork()
    if not process:
        run(*line.split())
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    num_steps += int(stride)
"""


@pytest.mark.parametrize(
    "store",
    [
        "directory",
        *(pytest.param(kind, marks=[pytest.mark.redis, pytest.mark.slow]) for kind in ("valkey", "cluster")),
        pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.slow]),
    ],
    indirect=True,
)
def test_a_worker_that_is_killed_loses_no_image(store: Store) -> None:
    """A worker killed at any step of an opening or a close leaves other sessions their image.

    What killed workers leave is deleted when their sessions expire.
    """
    shared = new_picture()
    kept = open_session(store.journal, ALICE, shared, lives_s=7200)
    stride = "3" if store.url.startswith("s3:") else "1"  # which takes many steps
    command = [sys.executable, "-c", KILLED, store.url, ALICE, shared.decode(), stride]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout.readline() == "ready\n"
        statuses = []
        while not statuses or statuses[-1] != 0:
            old, new = open_session(store.journal, ALICE, shared, lives_s=600), new_id(600)
            print(old, new, file=worker.stdin, flush=True)
            statuses.append(int(worker.stdout.readline()))
            assert store.journal.get_image(kept, image_hash(shared)) == shared
        worker.stdin.close()

    assert set(statuses[:-1]) == {9}
    assert len(statuses) > 6
    now = int(time.time())
    store.pass_time(700)
    for _ in range(2):
        store.journal.sweep(now + 660, is_full=True)
    assert store.journal.get_image(kept, image_hash(shared)) == shared
    assert store.dump().count(shared) == 1
    store.pass_time(HOURS_S)
    store.journal.sweep(now + HOURS_S + 660, is_full=True)
    dump = store.dump()
    assert dump.count(shared) == 0
    assert b"ts-seq-" not in dump
