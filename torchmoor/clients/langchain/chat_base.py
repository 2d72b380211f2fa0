"""The base of both chat models: their parameters, and LangChain's methods over InvokeEndpointWithResponseStream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import (
    BaseChatModel,
    agenerate_from_stream,
    generate_from_stream,
)
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field

from torchmoor.clients.events import abort, read_event_stream
from torchmoor.clients.langchain.connection import EndpointConnection
from torchmoor.clients.langchain.messages import chunk_of
from torchmoor.clients.langchain.threads import read_in_thread
from torchmoor.clients.pieces import Piece
from torchmoor.clients.runtime import readable_errors


class StreamingEndpoint(EndpointConnection, BaseChatModel):
    """A chat model whose every call is a stream, `invoke` too, because whole answers have a time limit.

    Raises EndpointError if the endpoint refuses, StreamError if an answer breaks off, ValueError for content other than
    text and images.

    max_tokens, temperature, top_p, seed, stop: as OpenAI's. model_kwargs: more fields of the body. streaming: `invoke`
    calls back for each token. endpoint_kwargs: more arguments of invoke_endpoint_with_response_stream.
    """

    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    streaming: bool = False
    endpoint_kwargs: dict[str, Any] = Field(default_factory=dict)

    model_config = ConfigDict(populate_by_name=True, extra="forbid")

    @property
    def _llm_type(self) -> str:
        return "sagemaker-endpoint-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "sagemaker"
        params.setdefault("ls_model_name", self.endpoint_name)
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await agenerate_from_stream(self._astream(messages, stop, run_manager, **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = _StreamCall(self, messages, self._stop(stop), kwargs)
        with closing(call.pieces()) as pieces:
            for piece in pieces:
                chunk = chunk_of(piece, self.endpoint_name)
                if run_manager:
                    run_manager.on_llm_new_token(piece.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = _StreamCall(self, messages, self._stop(stop), kwargs)
        pieces = read_in_thread(call.pieces, call.abort)
        try:
            async for piece in pieces:
                chunk = chunk_of(piece, self.endpoint_name)
                if run_manager:
                    await run_manager.on_llm_new_token(piece.text, chunk=chunk)
                yield chunk
        finally:
            await pieces.aclose()

    def _stop(self, stop: list[str] | None) -> list[str]:
        return self.stop or [] if stop is None else stop

    def request(self, messages: Sequence[BaseMessage], stop: Sequence[str], more: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of invoke_endpoint_with_response_stream. more: parameters of this call."""
        raise NotImplementedError

    def answered(self, messages: Sequence[BaseMessage], answer: str) -> None:
        """Handle the end of a complete answer."""

    def _parameters(self, stop: Sequence[str], more: dict[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters; those of the call replace the model's."""
        return {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": list(stop) or None,
            **self.model_kwargs,
            **more,
        }

    def _arguments(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "EndpointName": self.endpoint_name,
            "ContentType": "application/json",
            "Accept": "text/event-stream",
            "Body": json.dumps(without_none(body)).encode(),
            **self.endpoint_kwargs,
        }


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are set."""
    return {name: value for name, value in fields.items() if value is not None}


class _StreamCall:
    """One invocation. `abort` may run in another thread than `pieces`."""

    def __init__(
        self, model: StreamingEndpoint, messages: Sequence[BaseMessage], stop: Sequence[str], more: dict[str, Any]
    ) -> None:
        self._model = model
        self._messages = messages
        self._stop = stop
        self._arguments = model.request(messages, stop, more)
        self._body: Any = None
        self._is_wanted = True

    def pieces(self) -> Generator[Piece, None, None]:
        """Yield the answer's pieces. Raises EndpointError, StreamError."""
        with readable_errors():
            self._body = self._model.runtime.invoke_endpoint_with_response_stream(**self._arguments)["Body"]
        if not self._is_wanted:
            self._body.close()
            return
        texts = []
        with closing(read_event_stream(self._body, self._stop)) as pieces:
            for piece in pieces:
                texts.append(piece.text)
                yield piece
        self._model.answered(self._messages, "".join(texts))

    def abort(self) -> None:
        """Cancel the call."""
        self._is_wanted = False
        abort(self._body)
