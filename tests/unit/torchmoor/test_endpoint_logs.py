"""CloudWatch Logs of instances with long logs: one answer reads a limited part, and the next ones continue."""

import asyncio
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from torchmoor.config.launcher import INSTANCE_LOG
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.control import log_files
from torchmoor.control.log_files import LogReader
from torchmoor.control.logs import EndpointLogs
from torchmoor.errors import RequestInvalid
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry

GROUP = {"logGroupName": "/aws/sagemaker/Endpoints/llava"}
STREAM = {**GROUP, "logStreamName": "AllTraffic/a"}
START = datetime(2026, 1, 1)
NUM_LINES = 20_000  # of one instance, about 10 MB


def line(number: int, text: str) -> str:
    return f"{(START + timedelta(seconds=number)).isoformat()},000 {text} {number}{' ' * 470}\n"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the logs of two instances; a line without a time belongs to the line before."""
    folder = tmp_path_factory.mktemp("run")
    for name, step in (("a", 1), ("b", 2)):
        path = folder / name / INSTANCE_LOG
        path.parent.mkdir(parents=True)
        lines = (line(number, f"line of {name}") for number in range(0, NUM_LINES, step))
        path.write_text("".join(lines) + "  a trace\n")
    return folder


@pytest.fixture
def logs(run_dir: Path) -> EndpointLogs:
    registry = Registry((EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),)),))
    for number, name in enumerate(("a", "b")):
        registry.add(Instance(name=name, endpoint="llava", model="llava", port=9000 + number))
    return EndpointLogs(registry, run_dir)


def call(logs: EndpointLogs, operation: str, **values: Any) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        return await logs.operations()[operation](values)

    return asyncio.run(run())


def pages(logs: EndpointLogs, operation: str, token: str = "nextToken", **values: Any) -> Iterator[list[Any]]:
    """Yield the events of each answer, as boto3's paginator and loops of other clients do."""
    while True:
        answer = call(logs, operation, **values)
        yield answer["events"]
        following = answer[token]
        if following in (None, values.get("nextToken")):
            return
        values["nextToken"] = following


def test_get_log_events_goes_on_after_a_part_without_events(logs: EndpointLogs) -> None:
    """Parts before the requested time give empty answers with a new token each, until the end."""
    last = int((START + timedelta(seconds=NUM_LINES - 1)).timestamp() * 1000)
    values = {**STREAM, "startFromHead": True, "startTime": last}

    found = list(pages(logs, "GetLogEvents", "nextForwardToken", **values))

    assert found[0] == []
    assert [each["message"].strip() for events in found for each in events] == [
        line(NUM_LINES - 1, "line of a").strip(),
        "a trace",
    ]
    values = {**STREAM, "endTime": int(START.timestamp() * 1000) + 1}
    found = list(pages(logs, "GetLogEvents", "nextBackwardToken", **values))
    assert found[0] == []
    assert [each["message"].strip() for events in found for each in events] == [line(0, "line of a").strip()]


def test_get_log_events_has_every_line_once(logs: EndpointLogs) -> None:
    answers = pages(logs, "GetLogEvents", "nextForwardToken", **STREAM, startFromHead=True)
    forward = [each for events in answers for each in events]
    assert len(forward) == NUM_LINES + 1
    backward = list(pages(logs, "GetLogEvents", "nextBackwardToken", **STREAM))
    assert [each for events in reversed(backward) for each in events] == forward


def test_filter_log_events_merges_streams_and_reads_a_part(logs: EndpointLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer reads at most 8 MiB and has only the events of this part."""
    num_read, read = [0], LogReader.read

    def count(reader: LogReader) -> list[Any]:
        num_read[0] += log_files.PIECE_BYTES
        return read(reader)

    monkeypatch.setattr(LogReader, "read", count)
    found, num_answers = [], 0
    for events in pages(logs, "FilterLogEvents", **GROUP, filterPattern="line 7"):
        assert num_read[0] <= log_files.MAX_READ_BYTES
        num_read[0], num_answers = 0, num_answers + 1
        found += events

    wanted = [number for number in range(NUM_LINES) if "7" in line(number, "line of a")]
    of_both = [number for number in wanted if not number % 2]
    assert len(found) == len(wanted) + len(of_both)
    assert [each["timestamp"] for each in found] == sorted(each["timestamp"] for each in found)
    assert len({each["eventId"] for each in found}) == len(found)
    assert num_answers > 1


@pytest.mark.parametrize("operation", ["GetLogEvents", "FilterLogEvents"])
def test_a_log_that_was_replaced_is_read_from_its_beginning(tmp_path: Path, operation: str) -> None:
    """After a log is replaced by a restart or a rollover, the new file is read from its beginning."""
    registry = Registry((EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),)),))
    registry.add(Instance(name="a", endpoint="llava", model="llava", port=9000))
    path = tmp_path / "a" / INSTANCE_LOG
    path.parent.mkdir(parents=True)
    path.write_text(line(1, "old") + line(2, "old"))
    logs = EndpointLogs(registry, tmp_path)
    values: dict[str, Any] = {**STREAM, "startFromHead": True} if operation == "GetLogEvents" else {**GROUP, "limit": 1}
    first = call(logs, operation, **values)
    token = first.get("nextForwardToken") or first["nextToken"]
    path.write_text(f"{START.isoformat()},000 new\n")

    assert [each["message"] for each in call(logs, operation, **values, nextToken=token)["events"]] == [
        f"{START.isoformat()},000 new"
    ]


def test_a_line_longer_than_a_piece_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (log_files.PIECE_BYTES + 10) + b"\nnext\nhalf a li")
    reader, events = LogReader(path), []
    while not reader.is_at_end:
        events += reader.read()

    assert [len(each.message) for each in events] == [log_files.PIECE_BYTES, 10, 4]
    assert reader.offset == log_files.PIECE_BYTES + 16


@pytest.mark.parametrize("token", ["5", "e30", "W10=", "eyJhIjogLTF9", "eyJhIjogIjEifQ==", "\u00e9"])
def test_a_token_of_another_form_is_refused(logs: EndpointLogs, token: str) -> None:
    with pytest.raises(RequestInvalid, match="nextToken is not valid"):
        call(logs, "FilterLogEvents", **GROUP, nextToken=token)


def test_streams_have_the_times_of_their_first_and_last_event(logs: EndpointLogs) -> None:
    streams = call(logs, "DescribeLogStreams", **GROUP)["logStreams"]

    start = int(START.timestamp() * 1000)
    times = [(each["firstEventTimestamp"] - start, each["lastEventTimestamp"] - start) for each in streams]
    assert times == [(0, (NUM_LINES - 1) * 1000), (0, (NUM_LINES - 2) * 1000)]


@pytest.fixture
def in_tokyo() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo-9")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("digits", ["0000-00-00T00:00:00", "0001-01-01T00:00:00", "9999-12-31T23:59:59"])
def test_digits_that_are_no_usable_time_do_not_end_the_answer(tmp_path: Path, in_tokyo: None, digits: str) -> None:
    """Digits that are not a usable time do not end the answer, such as year 1 in a time zone east of Greenwich."""
    path = tmp_path / "log"
    path.write_text(f"{digits},000 a line\n")

    [event] = LogReader(path).read()

    assert event.message == f"{digits},000 a line"
