"""Bodies of the control plane: their cost and where they are parsed."""

import asyncio
import errno
import json
import os
import threading
from typing import Any

import pytest

from torchmoor.config.aws import service_model
from torchmoor.control import cbor, protocol
from torchmoor.control.protocol import MAX_REASON_CHARS, MAX_VALUES, ControlPlane, Service, Values
from torchmoor.errors import RequestInvalid
from torchmoor.proxy.api.control_operation import ControlRequest
from torchmoor.proxy.http.message import Reply

MIB = 1 << 20


def answer(*bodies: bytes) -> list[Reply]:
    """Send requests at once to a control plane whose one operation lists nothing."""

    async def send() -> list[Reply]:
        plane = ControlPlane([Service("sagemaker", {"ListModels": list_nothing})])
        asked = [ControlRequest("SageMaker.ListModels", body) for body in bodies]
        return await asyncio.gather(*map(plane.answer, asked))

    return asyncio.run(send())


def list_nothing(values: Values) -> Values:
    return {"Models": []}


def refused(body: bytes) -> str:
    [reply] = answer(body)
    assert reply.status == 400
    content = json.loads(reply.body)
    assert content["__type"] == "ValidationException"
    return content["message"]


@pytest.mark.parametrize(
    ("body", "is_cbor"),
    [
        (b'{"Models":[' + b"1," * (MIB // 2) + b"1]}", False),
        (b"[" + b"{}," * (MIB // 3) + b"{}]", False),
        (b"\xa1\x66Models\x9f" + b"\x01" * MIB + b"\xff", True),
        (b"\x9f" + b"\xa0" * MIB + b"\xff", True),
        (b"\x9b\x00\x00\x00\x00\x00\x10\x00\x00" + b"\x40" * MIB, True),
    ],
)
def test_body_with_too_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch, body: bytes, is_cbor: bool) -> None:
    """1 MiB of values would take the event loop 4 s in JSON and 12 s in CBOR, with an error of 100 MB."""

    model = service_model("sagemaker").operation_model("ListModels")

    def parse(*_: Any) -> Any:
        raise AssertionError("the body is parsed")

    monkeypatch.setattr(json, "loads", parse)
    monkeypatch.setattr(cbor, "read", parse)

    with pytest.raises(RequestInvalid, match=f"more than {MAX_VALUES} values"):
        protocol.read_input(model, body, is_cbor=is_cbor)


@pytest.mark.parametrize("key", ["Wrong", "NameContains"])
def test_error_quotes_only_the_beginning_of_a_wrong_input(key: str) -> None:
    message = refused(json.dumps({key: "x" * MIB, "x" * MIB: 1}).encode())

    assert len(message) == MAX_REASON_CHARS + 3
    assert message.startswith("ListModels: Unknown parameter")


@pytest.mark.parametrize("depth", [400, 900, 9000])
def test_deep_values_are_refused(depth: int) -> None:
    """Deep values are refused, whether the parser or a later step reaches Python's limit."""
    assert refused(b'{"NameContains":' + b"[" * depth + b"]" * depth + b"}")


@pytest.mark.parametrize("time", [b"1e30", b"-1e30", b"1e400", b'"0001-01-01T00:00:00+14:00"'])
def test_a_time_that_no_date_can_be_is_refused(time: bytes) -> None:
    """A time outside the range of dates is a client error, without a traceback."""
    assert "ListModels" in refused(b'{"CreationTimeAfter":' + time + b"}")


@pytest.mark.parametrize(
    ("field", "number"),
    [
        *(("DesiredWeight", each) for each in ("NaN", "1e400", "1" + "0" * 400)),
        *(("DesiredInstanceCount", each) for each in (str(2**31), "1" + "0" * 400)),
    ],
)
def test_a_number_that_its_type_does_not_have_is_refused(field: str, number: str) -> None:
    """Arithmetic with it would fail later."""
    model = service_model("sagemaker").operation_model("UpdateEndpointWeightsAndCapacities")
    desired = f'{{"VariantName": "v", "{field}": {number}}}'
    body = f'{{"EndpointName": "e", "DesiredWeightsAndCapacities": [{desired}]}}'

    with pytest.raises(RequestInvalid, match=rf"Capacities\[0\]\.{field} must be a number of the type"):
        protocol.read_input(model, body.encode(), is_cbor=False)


@pytest.mark.parametrize(
    ("container", "problem"),
    [
        (
            {"Environment": {f"N{number}": "" for number in range(101)}},
            "Environment must have 100 entries at most, not 101",
        ),
        ({"Image": "a" * 256}, "Image must have 255 characters at most, not 256"),
    ],
)
def test_a_value_that_is_too_long_is_refused(container: dict[str, Any], problem: str) -> None:
    model = service_model("sagemaker").operation_model("CreateModel")
    body = json.dumps({"ModelName": "m", "PrimaryContainer": container}).encode()

    with pytest.raises(RequestInvalid, match=problem):
        protocol.read_input(model, body, is_cbor=False)


async def test_a_change_that_cannot_be_recorded_is_refused_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    """An operator sees that the disk is full, and the log is not filled with tracebacks."""

    def fill_the_disk(values: Values) -> Values:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    plane = ControlPlane([Service("sagemaker", {"ListModels": fill_the_disk})])
    reply = await plane.answer(ControlRequest("SageMaker.ListModels", b"{}"))

    assert reply.status == 500
    assert json.loads(reply.body) == {
        "__type": "InternalFailure",
        "message": "The control plane cannot record the change: No space left on device.",
    }
    assert "Traceback" not in caplog.text


def test_a_time_in_cbor_that_no_date_can_be_is_refused() -> None:
    body = b"\xa1\x71CreationTimeAfter\xc1" + cbor.write(1e30)

    with pytest.raises(RequestInvalid, match="not valid CBOR"):
        protocol.read_input(service_model("sagemaker").operation_model("ListModels"), body, is_cbor=True)


def test_bodies_are_read_one_at_a_time_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are parsed one at a time in a thread, so that 64 bodies of 1 MB do not delay other requests."""
    threads: list[int] = []
    reading = threading.Lock()
    read = protocol.read_input

    def note(*args: Any, **options: Any) -> Values:
        threads.append(threading.get_ident())
        assert reading.acquire(blocking=False)
        try:
            return read(*args, **options)
        finally:
            reading.release()

    monkeypatch.setattr(protocol, "read_input", note)

    assert [reply.status for reply in answer(*[b"{}"] * 64)] == [200] * 64
    assert threading.get_ident() not in threads
    assert len(threads) == 64


@pytest.mark.parametrize(
    ("body", "number"),
    [
        (b"", 0),
        (cbor.write({"a": [1, 300, 70_000, 1 << 40], "bc": {"d": "text" * 100, "e": True}, "f": -5, "g": 0.5}), 17),
        (b"\x9f\x01\x02\xff", 4),
        (b"\x59\x01\x00" + bytes(256) + b"\x01", 2),
        (b"\x5b\xff\xff\xff\xff\xff\xff\xff\xff\x01", 1),
    ],
)
def test_items_of_cbor_are_counted(body: bytes, number: int) -> None:
    """CBOR items of every kind count: with long heads, invalid contents, indefinite length, or longer than the body."""
    assert cbor.count_items(body, 100) == number
    assert cbor.count_items(body * 200, 100) <= 101
