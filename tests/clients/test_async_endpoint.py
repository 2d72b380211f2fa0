"""SagemakerAsyncEndpoint: its requests and its waiting, with results in files and in the test's own S3."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.waiting import wait_until
from torchmoor.clients.errors import AsyncInferenceFailed, AsyncInferenceTimedOut, EndpointAsleep, EndpointError
from torchmoor.clients.langchain import SagemakerAsyncEndpoint

FAST = {"first_delay": 0.001, "max_delay": 0.01, "max_wait": 60.0}


class FakeS3:
    """Objects by bucket and key."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], bytes] = {}
        self.missing = "NoSuchKey"
        self.num_missed = 0

    def put_object(self, *, Bucket: str, Key: str, Body: bytes, ContentType: str) -> None:
        self.objects[Bucket, Key] = Body

    def get_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:
        if (Bucket, Key) not in self.objects:
            self.num_missed += 1
            raise ClientError({"Error": {"Code": self.missing, "Message": "not there"}}, "GetObject")
        return {"Body": io.BytesIO(self.objects[Bucket, Key])}


class FakeQueue:
    """An endpoint that accepts requests. answer, failure: what it writes `after_s` seconds after each."""

    def __init__(self, folder: Path, answer: bytes | None = None, failure: bytes | None = None, after_s: float = 0):
        self._folder = folder
        self._written = [(name, data) for name, data in (("out", answer), ("error", failure)) if data is not None]
        self._after_s = after_s
        self.asked: list[dict[str, Any]] = []
        self.num_instances = 0

    def invoke_endpoint_async(self, **arguments: Any) -> dict[str, str]:
        self.asked.append(arguments)
        threading.Timer(self._after_s, self._write).start()
        return {
            "InferenceId": "i1",
            "OutputLocation": (self._folder / "a b.out").as_uri(),
            "FailureLocation": (self._folder / "a b.error").as_uri(),
        }

    def _write(self) -> None:
        for name, data in self._written:
            part = self._folder / str(uuid.uuid4())
            part.write_bytes(data)
            part.rename(self._folder / f"a b.{name}")

    def describe_endpoint(self, *, EndpointName: str) -> dict[str, Any]:
        return {"ProductionVariants": [{"CurrentInstanceCount": self.num_instances}]}


def endpoint(queue: FakeQueue, **fields: Any) -> SagemakerAsyncEndpoint:
    return SagemakerAsyncEndpoint(endpoint_name="llm", client=queue, **{**FAST, **fields})


def test_a_result_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    """The client submits TGI's body in the request and waits until the result file exists."""
    queue = FakeQueue(tmp_path, b'[{"generated_text": "once"}]', after_s=0.05)
    llm = endpoint(queue, model_kwargs={"max_new_tokens": 3, "seed": 1}, endpoint_kwargs={"InferenceId": "i1"})

    assert llm.invoke("Tell", stop=["x"], seed=2) == "once"

    [asked] = queue.asked
    parameters = {"max_new_tokens": 3, "seed": 2, "stop": ["x"]}
    assert json.loads(asked.pop("Body")) == {"inputs": "Tell", "parameters": parameters}
    assert asked == {
        "EndpointName": "llm",
        "ContentType": "application/json",
        "Accept": "application/json",
        "InferenceId": "i1",
    }


async def test_waiting_takes_no_thread(tmp_path: Path) -> None:
    """More concurrent ainvoke calls than threads can wait at the same time."""
    llm = endpoint(FakeQueue(tmp_path, b'{"response_text": "yes"}', after_s=0.1))

    assert await asyncio.gather(*(llm.ainvoke("?") for _ in range(100))) == ["yes"] * 100


@pytest.mark.parametrize(
    "answer",
    [
        b'{"generated_text": "a b STOP c"}',
        b'{"choices": [{"message": {"content": "a b STOP c"}, "finish_reason": "stop"}]}',
        b'data: {"token": {"text": "a b ST"}}\n\ndata: {"token": {"text": "OP c"}, "generated_text": "a b STOP c"}\n\n',
        b'{"outputs": ["a b "]}\n{"outputs": ["STOP c"]}\n',
    ],
)
def test_answers_of_every_form_are_read_and_cut(tmp_path: Path, answer: bytes) -> None:
    """Whole answers and streams are read and cut at the first stop sequence."""
    assert endpoint(FakeQueue(tmp_path, answer)).invoke("?", stop=["STOP"]) == "a b "


def test_content_handlers_of_langchain_aws_serve(tmp_path: Path) -> None:
    """The class that users of SagemakerEndpoint write works unchanged."""
    from langchain_aws.llms.sagemaker_endpoint import LLMContentHandler

    class Handler(LLMContentHandler):
        content_type = "application/x-mine"
        accepts = "text/plain"

        def transform_input(self, prompt: str, model_kwargs: dict[str, Any]) -> bytes:
            return f"{prompt} {model_kwargs}".encode()

        def transform_output(self, output: Any) -> str:
            return str(output.read().decode().upper())

    queue = FakeQueue(tmp_path, b"loud")

    assert endpoint(queue, content_handler=Handler()).invoke("Tell", n=1) == "LOUD"
    assert queue.asked[0]["Body"] == b"Tell {'n': 1}"
    assert queue.asked[0]["ContentType"] == "application/x-mine"


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (
            b'Received client error (400) from primary with message "{"error": {"message": "too long"}}". See',
            "too long",
        ),
        (b'Received server error (500) from primary with message "oops"', '.* with message "oops"'),
        (b"", "the failure object is empty"),
    ],
)
def test_a_failure_object_is_told(tmp_path: Path, failure: bytes, told: str) -> None:
    """A failure object raises the handler's own message, if it has one, with the inference id."""
    llm = endpoint(FakeQueue(tmp_path, failure=failure))

    with pytest.raises(AsyncInferenceFailed, match=f"^{told}$") as caught:
        llm.invoke("?")

    assert caught.value.inference_id == "i1"


def test_an_answer_that_does_not_come_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """The wait ends at its limit with an error that names the output location."""
    llm = endpoint(FakeQueue(tmp_path), max_wait=0.05)

    with pytest.raises(AsyncInferenceTimedOut, match=r"a%20b\.out") as caught:
        llm.invoke("?")

    assert caught.value.output_location == (tmp_path / "a b.out").as_uri()
    with pytest.raises(AsyncInferenceTimedOut):
        asyncio.run(llm.ainvoke("?"))


def test_an_endpoint_at_zero_is_woken_by_the_request(tmp_path: Path) -> None:
    """Waiting for an endpoint at zero has its own limit; without it, the error names the output location."""
    asleep, waking = FakeQueue(tmp_path), FakeQueue(tmp_path, b'{"generated_text": "awake"}', after_s=0.2)
    cold = {"sagemaker_client": asleep, "max_wait": 0.001, "cold_start": 60.0}

    with pytest.raises(EndpointAsleep, match="has woken it") as caught:
        endpoint(asleep, on_cold_start="raise", **cold).invoke("?")
    assert caught.value.output_location.endswith(".out")
    assert len(asleep.asked) == 1
    assert endpoint(waking, on_cold_start="wait", **cold).invoke("?") == "awake"

    waking.num_instances = 1
    assert endpoint(waking, on_cold_start="raise", sagemaker_client=waking).invoke("?") == "awake"


def test_inputs_go_through_s3_where_that_is_asked_for(tmp_path: Path) -> None:
    """Inputs get unique names below an S3 prefix; without a prefix, a long input is refused with advice."""
    s3 = FakeS3()
    queue = FakeQueue(tmp_path, b'{"generated_text": "a"}')

    endpoint(queue, s3_client=s3, input_prefix="s3://inputs/below/").invoke("x" * 200_000)
    endpoint(queue, s3_client=s3, input_prefix="s3://inputs/below").invoke("y")

    locations = [asked["InputLocation"] for asked in queue.asked]
    assert [bucket for bucket, _ in s3.objects] == ["inputs", "inputs"]
    assert [f"s3://inputs/{key}" for _, key in s3.objects] == locations
    assert all(location.startswith("s3://inputs/below/") for location in locations)
    assert not any("Body" in asked for asked in queue.asked)
    with pytest.raises(ValueError, match="input_prefix"):
        endpoint(queue).invoke("x" * 200_000)
    with pytest.raises(ValueError, match=r"input_prefix must be s3://bucket/prefix, not 'file:///inputs'"):
        endpoint(queue, s3_client=s3, input_prefix="file:///inputs").invoke("z")


class S3Queue(FakeQueue):
    """A queue whose answers are in S3 and that has no failure location."""

    def invoke_endpoint_async(self, **arguments: Any) -> dict[str, str]:
        return {"InferenceId": "i1", "OutputLocation": "s3://outputs/a/i1.out"}


def test_results_in_s3_are_waited_for(tmp_path: Path) -> None:
    """A missing S3 object is not an error while the client waits."""
    s3 = FakeS3()

    def write() -> None:
        wait_until(lambda: s3.num_missed > 1, "the client waits")
        s3.objects["outputs", "a/i1.out"] = b'{"generated_text": "found"}'

    thread = threading.Thread(target=write)
    thread.start()
    assert endpoint(S3Queue(tmp_path), s3_client=s3).invoke("?") == "found"
    thread.join()


def test_missing_rights_are_told(tmp_path: Path) -> None:
    """Without ListBucket, S3 answers AccessDenied for missing objects; the client reports it and stops waiting."""
    s3 = FakeS3()
    s3.missing = "AccessDenied"

    with pytest.raises(EndpointError, match="s3:ListBucket on outputs"):
        endpoint(S3Queue(tmp_path), s3_client=s3).invoke("?")


def test_answers_are_bounded(tmp_path: Path) -> None:
    """The size of a result that the client reads is limited."""
    llm = endpoint(FakeQueue(tmp_path, b"x" * 101), max_answer_bytes=100)

    with pytest.raises(EndpointError, match="longer than 100 bytes"):
        llm.invoke("?")
