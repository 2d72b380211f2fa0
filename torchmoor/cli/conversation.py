"""Conversations with an endpoint through boto3's own SageMaker runtime client, for the commands `ask` and `chat`.

There are two kinds: a session, which the endpoint keeps; and messages, which the client keeps and sends again each time
(OpenAI's form), the only one that can begin with a system message.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from botocore.config import Config

from torchmoor.cli.waiting_notice import Progress
from torchmoor.clients import runtime
from torchmoor.clients.events import read_event_stream
from torchmoor.clients.receipts import read_receipt
from torchmoor.clients.runtime import readable_errors
from torchmoor.clients.signing import Login, Signer, make_client
from torchmoor.errors import TorchmoorError

READ_TIMEOUT_S = 120
HINT = " (is `torchmoor up` running, and is this its --url?)"


class ChatError(TorchmoorError):
    """A question cannot be asked as it stands; the message says why."""


class Conversation(Protocol):
    """receipt: of the last answer, complete when its text is. id: the session's; None without one."""

    id: str | None
    receipt: dict[str, Any]

    def ask(self, question: str, images: Sequence[str] = ()) -> Iterator[str]:
        """The answer's text in pieces, as it is generated. Raises CallFailed.

        images: as `image_reference` gives them.
        """
        ...

    def close(self) -> None:
        """Free what the endpoint holds for it. Raises CallFailed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which endpoint is asked, by whom and how."""

    url: str
    endpoint: str
    login: Login = field(default_factory=Login)
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Line:
    """The calls that both kinds make. say: told what is known while an answer is long in coming."""

    def __init__(self, target: Target, say: Callable[[str], None]) -> None:
        self.target = target
        with readable_errors():  # of boto3's own configuration
            try:
                self.client = make_client(target.url, target.login, Config(read_timeout=READ_TIMEOUT_S))
            except ValueError as error:
                raise ChatError(f"--url must be an http(s) address: {error}") from error
            self.progress = Progress(target.url, target.endpoint, Signer(target.login), say)

    def call(self, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One answer as a whole."""
        with readable_errors(HINT), self.progress.waiting():
            answer: dict[str, Any] = self.client.invoke_endpoint(
                EndpointName=self.target.endpoint,
                ContentType="application/json",
                SessionId=session_id,
                Body=json.dumps(body),
            )
        return answer

    @contextmanager
    def stream(self, body: Mapping[str, Any], **arguments: str) -> Iterator[tuple[Any, Callable[[], None]]]:
        """The streamed answer, and what is to be called when its first part is there."""
        with readable_errors(HINT), self.progress.waiting() as on_answer:
            yield (
                self.client.invoke_endpoint_with_response_stream(
                    EndpointName=self.target.endpoint,
                    ContentType="application/json",
                    Body=json.dumps(body),
                    **arguments,
                ),
                on_answer,
            )


class SessionConversation:
    """One session of the endpoint, a new one or one that is open."""

    def __init__(self, line: Line, session_id: str | None, images: Sequence[str] = ()) -> None:
        """images: that the session begins with; only for a new one."""
        self._line = line
        self.receipt: dict[str, Any] = {}
        if session_id is None:
            body: dict[str, Any] = {"requestType": "NEW_SESSION"}  # start_session insists on a picture
            if len(images) == 1:
                body = {"type": "start_session", "image": images[0]}
            elif images:
                body = {"type": "start_session", "images": list(images)}
            session_id = line.call("NEW_SESSION", body)["NewSessionId"].partition(";")[0]
        self.id: str | None = session_id

    def ask(self, question: str, images: Sequence[str] = ()) -> Iterator[str]:
        body: dict[str, Any] = {
            "type": "send_text_prompt",
            "prompt_text": question,
            "stream": True,
            "parameters": dict(self._line.target.parameters),
        }
        if images:
            body["images"] = list(images)
        decoder = codecs.getincrementaldecoder("utf-8")()
        with self._line.stream(body, SessionId=str(self.id)) as (answer, on_answer):
            self.receipt = read_receipt(answer["ResponseMetadata"]["HTTPHeaders"])
            for event in answer["Body"]:
                on_answer()
                if text := decoder.decode(event["PayloadPart"]["Bytes"]):
                    yield text

    def close(self) -> None:
        try:
            self._line.call(str(self.id), {"type": "close_session"})
        finally:
            self._line.client.close()


class MessagesConversation:
    """Messages in OpenAI's form, all of them sent each time. The endpoint keeps nothing that must be closed."""

    def __init__(self, line: Line, system: str | None, images: Sequence[str] = ()) -> None:
        self._line = line
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._first_images = tuple(images)
        self.receipt: dict[str, Any] = {}
        self.id: str | None = None

    def ask(self, question: str, images: Sequence[str] = ()) -> Iterator[str]:
        images = (*self._first_images, *images)
        content: Any = question
        if images:
            pictures = [{"type": "image_url", "image_url": {"url": image}} for image in images]
            content = [*pictures, {"type": "text", "text": question}]
        asked = [*self._messages, {"role": "user", "content": content}]
        parameters = dict(self._line.target.parameters)
        if "max_new_tokens" in parameters:
            parameters["max_tokens"] = parameters.pop("max_new_tokens")
        body = {"messages": asked, "stream": True, "stream_options": {"include_usage": True}, **parameters}
        said = ""
        with self._line.stream(body) as (answer, on_answer):
            self.receipt = read_receipt(answer["ResponseMetadata"]["HTTPHeaders"])
            for piece in read_event_stream(answer["Body"]):
                on_answer()
                if piece.usage is not None:
                    self.receipt["generated_tokens"] = piece.usage.answer_tokens
                if piece.text:
                    said += piece.text
                    yield piece.text
        self._messages = [*asked, {"role": "assistant", "content": said}]
        self._first_images = ()

    def close(self) -> None:
        self._line.client.close()


def image_reference(image: str) -> str:
    """An address as it is, a file as a data URL. Raises ChatError if it cannot be read."""
    try:
        return runtime.image_reference(image)
    except OSError as error:
        raise ChatError(f"cannot read {image}: {error.strerror}") from error
