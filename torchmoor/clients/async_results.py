"""Asynchronous requests: submit one, and wait for its result or its failure object.

Results are where the endpoint's configuration says: in S3, or below a local directory (`file://`), as with `torchmoor
up` on a laptop.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from torchmoor.clients.errors import AsyncInferenceFailed, AsyncInferenceTimedOut, EndpointAsleep, EndpointError
from torchmoor.clients.runtime import own_words, readable_errors
from torchmoor.wire.headers import MAX_INLINE_BYTES

MAX_SHOWN_CHARS = 2000  # of a failure object that is not an error body


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request that the endpoint accepted. failure_location: None if the endpoint configures none."""

    inference_id: str
    output_location: str
    failure_location: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for an answer, and how often to poll.

    start_s: additional time if `sagemaker` reports that the endpoint has no instance. waits_for_start: if False, such a
    call raises EndpointAsleep at once; its request stays submitted and starts an instance.
    """

    timeout_s: float = 900.0
    first_delay_s: float = 0.2
    max_delay_s: float = 10.0
    start_s: float = 900.0
    waits_for_start: bool = True

    def delays(self) -> Iterator[float]:
        """Yield delays that grow by half each time, with jitter so that callers do not poll in step."""
        delay = self.first_delay_s
        while True:
            yield delay * random.uniform(0.75, 1.25)
            delay = min(delay * 1.5, self.max_delay_s)


class AsyncEndpoint:
    """Submits asynchronous requests to one endpoint and polls their results.

    runtime: boto3's sagemaker-runtime client. s3: makes boto3's S3 client when it is needed. sagemaker: makes boto3's
    sagemaker client, which reports whether the endpoint has an instance; None: do not check. input_prefix:
    s3://bucket/prefix for inputs; None: inputs travel in the request, up to MAX_INLINE_BYTES.
    """

    def __init__(
        self,
        name: str,
        runtime: Any,
        s3: Callable[[], Any],
        *,
        sagemaker: Callable[[], Any] | None = None,
        input_prefix: str | None = None,
        patience: Patience | None = None,
        max_answer_bytes: int = 64 << 20,
    ) -> None:
        self._name = name
        self._runtime = runtime
        self._s3 = s3
        self._sagemaker = sagemaker
        self._input_prefix = input_prefix
        self._patience = patience or Patience()
        self._max_answer_bytes = max_answer_bytes

    def submit(self, body: bytes, content_type: str, accept: str, **more: Any) -> Submitted:
        """Submit a request, which starts an instance if there is none. more: arguments of invoke_endpoint_async.

        Raises EndpointError, ValueError if the body is too long to travel in the request or the prefix is not in S3.
        """
        where: dict[str, Any] = {"Body": body}
        if self._input_prefix is not None:
            where = {"InputLocation": self._upload(body, content_type)}
        elif len(body) > MAX_INLINE_BYTES:
            raise ValueError(
                f"the input has {len(body)} bytes; more than {MAX_INLINE_BYTES} go through S3: "
                "give input_prefix, s3://bucket/prefix"
            )
        with readable_errors():
            answer: Mapping[str, Any] = self._runtime.invoke_endpoint_async(
                EndpointName=self._name, ContentType=content_type, Accept=accept, **where, **more
            )
        return Submitted(answer["InferenceId"], answer["OutputLocation"], answer.get("FailureLocation"))

    def wait(self, submitted: Submitted) -> bytes:
        """Wait for the result. Raises AsyncInferenceError, EndpointError."""
        deadline = time.monotonic() + self._time_for(submitted)
        for delay in self._patience.delays():
            answer = self.poll(submitted)
            if answer is not None:
                return answer
            self._check_time(submitted, deadline)
            time.sleep(min(delay, max(deadline - time.monotonic(), 0)))
        raise AssertionError("delays have no end")

    async def await_answer(self, submitted: Submitted) -> bytes:
        """Wait for the result without blocking a thread. Raises as `wait`."""
        deadline = time.monotonic() + await asyncio.to_thread(self._time_for, submitted)
        for delay in self._patience.delays():
            answer = await asyncio.to_thread(self.poll, submitted)
            if answer is not None:
                return answer
            self._check_time(submitted, deadline)
            await asyncio.sleep(min(delay, max(deadline - time.monotonic(), 0)))
        raise AssertionError("delays have no end")

    def poll(self, submitted: Submitted) -> bytes | None:
        """Return the result, or None if it is not there yet.

        Raises AsyncInferenceFailed if there is a failure object, EndpointError.
        """
        answer = self._read(submitted.output_location)
        if answer is not None or submitted.failure_location is None:
            return answer
        failure = self._read(submitted.failure_location)
        if failure is None:
            return None
        text = failure.decode(errors="replace")
        raise AsyncInferenceFailed(
            own_words(text) or text[:MAX_SHOWN_CHARS] or "the failure object is empty",
            inference_id=submitted.inference_id,
            output_location=submitted.output_location,
        )

    def _time_for(self, submitted: Submitted) -> float:
        """Return how long to wait for this result. Raises EndpointAsleep."""
        patience = self._patience
        if self._sagemaker is None:
            return patience.timeout_s
        with readable_errors():
            variants = self._sagemaker().describe_endpoint(EndpointName=self._name).get("ProductionVariants", ())
        if any(variant.get("CurrentInstanceCount", 0) > 0 for variant in variants):
            return patience.timeout_s
        if patience.waits_for_start:
            return patience.timeout_s + patience.start_s
        raise EndpointAsleep(
            f"endpoint {self._name} has no instance yet; the request has woken it, and its result will be at "
            f"{submitted.output_location}",
            inference_id=submitted.inference_id,
            output_location=submitted.output_location,
        )

    def _check_time(self, submitted: Submitted, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise AsyncInferenceTimedOut(
                f"no answer in time; the request may still be answered, at {submitted.output_location}",
                inference_id=submitted.inference_id,
                output_location=submitted.output_location,
            )

    def _upload(self, body: bytes, content_type: str) -> str:
        assert self._input_prefix is not None
        location = f"{self._input_prefix.rstrip('/')}/{uuid.uuid4()}"
        bucket, key = _bucket_and_key(location)
        if not bucket:
            raise ValueError(f"input_prefix must be s3://bucket/prefix, not {self._input_prefix!r}")
        with readable_errors():
            self._s3().put_object(Bucket=bucket, Key=key, Body=body, ContentType=content_type)
        return location

    def _read(self, location: str) -> bytes | None:
        parts = urlsplit(location)
        if parts.scheme == "file":
            return self._read_file(unquote(parts.path))
        bucket, key = _bucket_and_key(location)
        if not bucket:
            raise EndpointError(f"an answer is at s3://bucket/key or file:///path, not at {location!r}")
        try:
            with readable_errors():
                answer = self._s3().get_object(Bucket=bucket, Key=key)
                with answer["Body"] as stream:
                    return self._within_limit(location, stream.read(self._max_answer_bytes + 1))
        except EndpointError as error:
            if error.code in ("NoSuchKey", "404"):
                return None
            if error.code in ("AccessDenied", "403"):
                raise EndpointError(
                    f"{location} cannot be read: that needs s3:GetObject there, and s3:ListBucket on {bucket} to see "
                    "that an answer does not exist yet",
                    code=error.code,
                ) from error
            raise

    def _read_file(self, path: str) -> bytes | None:
        try:
            with open(path, "rb") as file:
                return self._within_limit(path, file.read(self._max_answer_bytes + 1))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EndpointError(f"{path} cannot be read: {error.strerror}") from error

    def _within_limit(self, location: str, data: bytes) -> bytes:
        if len(data) > self._max_answer_bytes:
            raise EndpointError(f"the answer at {location} is longer than {self._max_answer_bytes} bytes")
        return data


def _bucket_and_key(location: str) -> tuple[str, str]:
    """Split s3://bucket/key. Both are empty for another location."""
    scheme, _, rest = location.partition("://")
    bucket, _, key = rest.partition("/")
    return (bucket, key) if scheme == "s3" and bucket and key else ("", "")
