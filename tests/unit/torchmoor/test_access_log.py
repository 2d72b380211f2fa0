"""The access log alone: lines, limit, and several writers of one file."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from torchmoor.config.observe import ObserveSettings
from torchmoor.errors import ConfigError
from torchmoor.proxy.dispatch.record import RequestRecord
from torchmoor.proxy.observe.access_log import PIPE_BYTES, AccessLog, render

WRITER = """
import sys
from tests.unit.torchmoor.test_access_log import make_record
from torchmoor.config.observe import ObserveSettings
from torchmoor.proxy.observe import access_log
access_log.INTERVAL_S = 0.001
log = access_log.AccessLog(ObserveSettings(access_log=sys.argv[1], access_log_buffer_bytes=1 << 24))
log.start()
for number in range(2000):
    log.write(make_record(f"{sys.argv[2]}-{number}"))
log.stop()
assert not log.num_dropped
"""


def make_record(inference_id: str = "one", *, path: str = "/", **values: object) -> RequestRecord:
    record = RequestRecord("id", "POST", path, "answered", 0.0015)
    record.ended_at = 1_700_000_000.25
    record.inference_id = inference_id
    record.operation = "InvokeEndpoint"
    for name, value in values.items():
        setattr(record, name, value)
    return record


def make_log(target: Path | str, max_buffer_bytes: int = 1 << 20) -> AccessLog:
    return AccessLog(ObserveSettings(access_log=str(target), access_log_buffer_bytes=max_buffer_bytes))


def test_line_is_json_whatever_clients_send() -> None:
    """Quotes, line ends and non-ASCII characters are escaped; fields that do not apply are left out."""
    record = make_record(
        'a "b"\nc', path="/\x7f\u00e9", operation=None, error_type='x"', target_model="m\\n.tar.gz", status=424
    )

    data = render(record)

    line = json.loads(data)
    assert data.count(b"\n") == 1
    assert line["time"] == "2023-11-14T22:13:20.250Z"
    assert (line["inference_id"], line["path"]) == ('a "b"\nc', "/\x7f\u00e9")
    assert (line["error_type"], line["target_model"]) == ('x"', "m\\n.tar.gz")
    assert (line["status"], line["total_ms"]) == (424, 1.5)
    assert not {"instance", "upstream_ms", "session"} & line.keys()


def test_lines_beyond_the_buffer_are_dropped_and_counted(tmp_path: Path) -> None:
    """Lines beyond the buffer are dropped and counted, so that requests do not wait for a slow disk."""
    size = len(render(make_record()))
    log = make_log(tmp_path / "log", max_buffer_bytes=3 * size)
    for _ in range(5):
        log.write(make_record())

    log.start()
    log.stop()

    assert (log.num_lines, log.num_dropped) == (3, 2)
    assert (tmp_path / "log").read_bytes().count(b"\n") == 3


def test_full_disk_costs_lines_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """A full disk is logged once, and lost lines are counted."""
    log = make_log("/dev/full")
    log.start()
    log.write(make_record())
    log.stop()

    assert log.num_dropped == 1
    assert caplog.text.count("access log not written") == 1


def test_line_after_a_full_disk_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line does not continue the partial one that was written before the disk became full."""
    path = tmp_path / "log"
    log = make_log(path)
    write, room = os.write, [len(render(make_record("first"))) // 2]

    def write_while_there_is_room(file: int, data: memoryview) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: room.pop()])

    log.start()
    with monkeypatch.context() as full_disk:
        full_disk.setattr("torchmoor.proxy.observe.access_log.os.write", write_while_there_is_room)
        log.write(make_record("first"))
        wait_until(lambda: log.num_dropped, "the disk is full")
    log.write(make_record("second"))
    log.write(make_record("third"))
    log.stop()

    _, *whole = path.read_bytes().splitlines()
    assert [json.loads(line)["inference_id"] for line in whole] == ["second", "third"]


@pytest.mark.parametrize("is_reopened", [False, True])
def test_line_that_an_earlier_process_left_torn_is_ended_first(is_reopened: bool, tmp_path: Path) -> None:
    """A partial last line of an earlier process is ended first, so that the first new line is whole."""
    path = tmp_path / "log"
    log = make_log(path)
    if is_reopened:
        log.start()
        path.rename(tmp_path / "moved")
    path.write_bytes(b'{"time":"2023-')

    if is_reopened:
        log.reopen()
        wait_until(lambda: path.read_bytes().endswith(b"\n"), "the new file is open")
    else:
        log.start()
    log.write(make_record("first"))
    log.stop()

    torn, whole = path.read_bytes().splitlines()
    assert torn == b'{"time":"2023-'
    assert json.loads(whole)["inference_id"] == "first"


def test_whole_lines_of_an_earlier_process_are_followed_by_the_next(tmp_path: Path) -> None:
    """New lines follow an earlier process's whole lines without an empty line."""
    for _ in range(2):
        log = make_log(tmp_path / "log")
        log.start()
        log.write(make_record())
        log.stop()

    assert (tmp_path / "log").read_bytes() == render(make_record()) * 2


def test_file_that_cannot_be_opened_is_a_configuration_error(tmp_path: Path) -> None:
    """The error has the path and the reason."""
    with pytest.raises(ConfigError, match=r"observe.access_log: cannot append to .*: No such file or directory"):
        make_log(tmp_path / "nowhere" / "log").start()


def test_new_file_that_cannot_be_opened_leaves_the_old_one_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If a rotation cannot open the new file, the old one stays in use and no line is lost."""
    folder = tmp_path / "logs"
    folder.mkdir()
    log = make_log(folder / "log")
    log.start()
    folder.rename(tmp_path / "moved")

    log.reopen()
    wait_until(lambda: "access log not reopened" in caplog.text, "the failed reopening")
    log.write(make_record())
    log.stop()

    assert (tmp_path / "moved" / "log").read_bytes().count(b"\n") == 1


def test_several_processes_append_whole_lines(tmp_path: Path) -> None:
    """Several processes, such as proxies on one host, append whole lines."""
    path = tmp_path / "log"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number)], cwd=Path(__file__).parents[3])
        for number in range(3)
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]

    ids = [json.loads(line)["inference_id"] for line in path.read_bytes().splitlines()]
    assert sorted(ids) == sorted(f"{writer}-{number}" for writer in range(3) for number in range(2000))


def test_pipe_gets_no_more_at_once_than_it_takes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes to a pipe are within its atomic size, so that lines of several processes do not mix."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    pieces: list[bytes] = []
    write = os.write

    def record(file: int, data: memoryview) -> int:
        pieces.append(bytes(data))
        return write(file, data)

    monkeypatch.setattr("torchmoor.proxy.observe.access_log.os.write", record)
    log = make_log(path)
    for _ in range(100):
        log.write(make_record())
    log.start()
    log.stop()
    os.close(reader)

    assert b"".join(pieces).count(b"\n") == 100
    assert all(len(piece) <= PIPE_BYTES and piece.endswith(b"\n") for piece in pieces)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"traces_url": "collector:4318"}, "observe.traces_url must begin with http:// or https://"),
        ({"traces_fraction": 1.5}, "observe.traces_fraction must be above 0 and at most 1"),
        ({"access_log_buffer_bytes": 0}, "observe.access_log_buffer_bytes must be positive"),
    ],
)
def test_settings_name_what_is_wrong(values: dict[str, Any], problem: str) -> None:
    """Wrong settings are named before a file is opened."""
    with pytest.raises(ConfigError, match=problem):
        ObserveSettings(**values)


def test_pipe_that_no_program_reads_is_an_error(tmp_path: Path) -> None:
    """Opening it would wait for a reader, and nothing could end the proxy meanwhile."""
    path = tmp_path / "pipe"
    os.mkfifo(path)

    with pytest.raises(ConfigError, match="no program reads this pipe"):
        make_log(path).start()
