"""An LLM over InvokeEndpointAsync, for endpoints that scale to zero."""

from __future__ import annotations

import asyncio
import io
import json
from functools import cached_property
from typing import Any, Literal, Protocol

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import LLM
from pydantic import ConfigDict, Field

from torchmoor.clients.async_results import AsyncEndpoint, Patience
from torchmoor.clients.langchain.connection import EndpointConnection
from torchmoor.clients.streams import StopCutter, read_stream

USUAL = Patience()


class ContentHandler(Protocol):
    """The form of langchain_aws' LLMContentHandler; handlers of SagemakerEndpoint can be used here."""

    content_type: str
    accepts: str

    def transform_input(self, prompt: Any, model_kwargs: dict[str, Any]) -> bytes: ...

    def transform_output(self, output: Any) -> str:
        """Return the text of an output, which has `read()`."""
        ...


class SagemakerAsyncEndpoint(EndpointConnection, LLM):
    """Submits a prompt and waits for its result. The request starts an instance if the endpoint has none.

        llm = SagemakerAsyncEndpoint(endpoint_name="llm", endpoint_url="http://127.0.0.1:8080")
        llm.invoke("Once upon a time", max_new_tokens=100)

    Raises AsyncInferenceFailed with the failure object's message, AsyncInferenceTimedOut (`output_location` is where
    the result will be), EndpointError. `ainvoke` waits without a thread.

    content_handler: None: TGI's body `{"inputs", "parameters"}`, and answers of TGI, LMI, OpenAI or a session, whole or
    as a stream. model_kwargs: parameters of the model. endpoint_kwargs: more arguments of invoke_endpoint_async.
    input_prefix: s3://bucket/prefix for inputs; None: they travel in the request, up to 128,000 bytes.
    max_wait: seconds until AsyncInferenceTimedOut. on_cold_start: what to do if SageMaker (sagemaker:DescribeEndpoint)
    reports no instance: wait for `cold_start` seconds more, or raise EndpointAsleep at once; None: do not check, and
    max_wait includes a start.
    """

    model_config = ConfigDict(extra="forbid")

    content_handler: Any = None
    endpoint_kwargs: dict[str, Any] = Field(default_factory=dict)
    input_prefix: str | None = None
    max_wait: float = Field(default=USUAL.timeout_s, gt=0)
    first_delay: float = Field(default=USUAL.first_delay_s, gt=0)
    max_delay: float = Field(default=USUAL.max_delay_s, gt=0)
    on_cold_start: Literal["wait", "raise"] | None = None
    cold_start: float = Field(default=USUAL.start_s, ge=0)
    max_answer_bytes: int = Field(default=64 << 20, gt=0)
    s3_client: Any = Field(default=None, exclude=True)
    sagemaker_client: Any = Field(default=None, exclude=True)

    @property
    def _llm_type(self) -> str:
        return "sagemaker-async-endpoint"

    @cached_property
    def _endpoint(self) -> AsyncEndpoint:
        return AsyncEndpoint(
            self.endpoint_name,
            self.runtime,
            lambda: self._s3,
            sagemaker=None if self.on_cold_start is None else lambda: self._sagemaker,
            input_prefix=self.input_prefix,
            patience=Patience(
                timeout_s=self.max_wait,
                first_delay_s=self.first_delay,
                max_delay_s=self.max_delay,
                start_s=self.cold_start,
                waits_for_start=self.on_cold_start != "raise",
            ),
            max_answer_bytes=self.max_answer_bytes,
        )

    @cached_property
    def _s3(self) -> Any:
        return self.s3_client or self.make_client("s3")

    @cached_property
    def _sagemaker(self) -> Any:
        return self.sagemaker_client or self.make_client("sagemaker")

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        handler, body = self._input(prompt, stop, kwargs)
        submitted = self._endpoint.submit(body, handler.content_type, handler.accepts, **self.endpoint_kwargs)
        return self._output(handler, self._endpoint.wait(submitted), stop)

    async def _acall(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        handler, body = self._input(prompt, stop, kwargs)
        submitted = await asyncio.to_thread(
            self._endpoint.submit, body, handler.content_type, handler.accepts, **self.endpoint_kwargs
        )
        return self._output(handler, await self._endpoint.await_answer(submitted), stop)

    def _input(self, prompt: str, stop: list[str] | None, more: dict[str, Any]) -> tuple[ContentHandler, bytes]:
        handler = self.content_handler or _AnyForm(stop)
        return handler, handler.transform_input(prompt, {**self.model_kwargs, **more})

    @staticmethod
    def _output(handler: ContentHandler, answer: bytes, stop: list[str] | None) -> str:
        cutter = StopCutter(stop or ())
        return cutter.feed(handler.transform_output(io.BytesIO(answer))) + cutter.flush()


class _AnyForm:
    content_type = accepts = "application/json"

    def __init__(self, stop: list[str] | None) -> None:
        self._stop = stop

    def transform_input(self, prompt: Any, model_kwargs: dict[str, Any]) -> bytes:
        parameters = {**model_kwargs, "stop": self._stop} if self._stop else model_kwargs
        return json.dumps({"inputs": prompt, "parameters": parameters}).encode()

    def transform_output(self, output: Any) -> str:
        return "".join(piece.text for piece in read_stream([output.read()]))
