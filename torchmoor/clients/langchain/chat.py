"""The chat models: with each call, one sends the whole conversation in OpenAI's form, the other only what is new."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from langchain_core.messages import BaseMessage
from pydantic import PrivateAttr

from torchmoor.clients.errors import EndpointError, SessionMismatch
from torchmoor.clients.langchain.chat_base import StreamingEndpoint, without_none
from torchmoor.clients.langchain.messages import openai_messages, texts_and_images
from torchmoor.clients.runtime import image_reference, readable_errors


class ChatSagemakerSession(StreamingEndpoint):
    """One session, which ChatSagemakerEndpoint.open_session opens. Use it in a `with`, or close it.

        with model.open_session(["picture.png"]) as chat:
            chat.invoke("What color is the circle?")
            chat.invoke("And what shape is left of it?")

    A call takes the user's next messages. The conversation so far may precede them, as LangChain's histories have it;
    it is not sent, and the call raises SessionMismatch if it differs from the session's. A call whose answer broke off,
    or was not read to its end, leaves the session unchanged.
    """

    session_id: str
    _said: list[str] = PrivateAttr(default_factory=list)  # a digest of each message of the conversation

    def __enter__(self) -> ChatSagemakerSession:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(EndpointError):  # the session expires anyway, and must not hide an error of the block
            self.close()

    def close(self) -> None:
        """Close the session at the endpoint. Raises EndpointError, also if the session has ended."""
        _invoke(self, self.session_id, {"requestType": "CLOSE"})

    def request(self, messages: Sequence[BaseMessage], stop: Sequence[str], more: dict[str, Any]) -> dict[str, Any]:
        before, new = self._split(openai_messages(messages))
        if before and before != self._said[-len(before) :]:
            raise SessionMismatch(
                "the messages before the question are not what was said in this session; open another, or send only "
                "what is new"
            )
        texts, images = zip(*map(texts_and_images, new), strict=True)
        parameters = self._parameters(stop, more)
        parameters["max_new_tokens"] = parameters.get("max_new_tokens", parameters.pop("max_tokens", None))
        body = {
            "type": "send_text_prompt",
            "prompt_text": "\n".join(text for several in texts for text in several),
            "images": [image for several in images for image in several],
            "stream": True,
            "parameters": without_none(parameters),
        }
        return {**self._arguments(body), "SessionId": self.session_id}

    def answered(self, messages: Sequence[BaseMessage], answer: str) -> None:
        _, new = self._split(openai_messages(messages))
        self._said += [*map(_digest, new), _digest({"role": "assistant", "content": answer})]

    def _split(self, messages: list[dict[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
        """Split into digests of the messages up to the last answer, and the new messages after it."""
        if any(message["role"] == "system" for message in messages):
            raise ValueError(
                "a session does not accept a system message: put it into the first question, or ask without a session"
            )
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        begin = answers[-1] + 1 if answers else 0
        if begin == len(messages):
            raise ValueError("there is no question: the last message must be the user's")
        return [_digest(message) for message in messages[:begin]], messages[begin:]


def _invoke(model: StreamingEndpoint, session_id: str, body: dict[str, Any]) -> dict[str, Any]:
    with readable_errors():
        answer: dict[str, Any] = model.runtime.invoke_endpoint(
            EndpointName=model.endpoint_name,
            ContentType="application/json",
            SessionId=session_id,
            Body=json.dumps(body).encode(),
        )
        with answer["Body"] as stream:
            stream.read()
    return answer


def _digest(message: dict[str, Any]) -> str:
    content = [message["role"], *texts_and_images(message)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


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
        body: dict[str, Any] = {"requestType": "NEW_SESSION", "images": [image_reference(image) for image in images]}
        if ttl_s is not None:
            body["ttl_s"] = ttl_s
        opened = _invoke(self, "NEW_SESSION", body)
        # Only what was set: LangChain would not stream with an explicit streaming=False.
        given = StreamingEndpoint.model_fields.keys() & self.model_fields_set
        fields = {name: getattr(self, name) for name in given}
        fields["client"] = self.runtime
        return ChatSagemakerSession(**fields, session_id=opened["NewSessionId"].partition(";")[0])

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
