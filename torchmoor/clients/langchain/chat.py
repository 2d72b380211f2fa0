"""A chat model that sends the whole conversation with each call, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.messages import BaseMessage

from torchmoor.clients.langchain.chat_base import StreamingEndpoint
from torchmoor.clients.langchain.messages import openai_messages
from torchmoor.clients.langchain.session import ChatSagemakerSession, open_session


class ChatSagemakerEndpoint(StreamingEndpoint):
    """Streams answers of an endpoint that understands OpenAI's chat completions; texts and images, no tools.

    model = ChatSagemakerEndpoint(endpoint_name="llava", endpoint_url="http://127.0.0.1:8080")
    for chunk in model.stream("What is in the image?"):
        print(chunk.text, end="", flush=True)
    """

    def open_session(
        self, images: Sequence[str | bytes | Path] = (), *, ttl_s: int | None = None
    ) -> ChatSagemakerSession:
        """Open a conversation that the endpoint keeps, with its images.

        images: addresses (https, s3, data), files or bytes. Raises EndpointError, OSError if a file cannot be read.
        """
        return open_session(self, images, ttl_s)

    def request(self, messages: Sequence[BaseMessage], stop: Sequence[str], more: dict[str, Any]) -> dict[str, Any]:
        return self._arguments(
            {
                "model": self.endpoint_name,
                "messages": openai_messages(messages),
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._parameters(stop, more),
            }
        )
