"""Conversations with an endpoint through boto3's SageMaker runtime client, for `ask` and `chat`.

A session is kept by the endpoint. Messages (OpenAI's form) are kept by the client, which sends all of them with each
question; only they can begin with a system message.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from botocore.config import Config

from torchmoor.cli.waiting_notice import EndpointWatch
from torchmoor.clients import runtime
from torchmoor.clients.errors import EndpointError, UnreadableStream
from torchmoor.clients.events import read_event_stream
from torchmoor.clients.receipts import read_receipt
from torchmoor.clients.runtime import readable_errors
from torchmoor.clients.signing import SERVICE, Login, Signer, make_client
from torchmoor.errors import TorchmoorError

READ_TIMEOUT_S = 120
LIST_TIMEOUT_S = 5
HINT = " (is `torchmoor up` running, and is this its --url?)"


NEEDS_TARGET_MODEL = "missing a target model header"  # SageMaker's words, which the proxy uses


class ChatError(TorchmoorError):
    """A question cannot be sent; the message says why."""


class Conversation(Protocol):
    """A conversation. receipt: of the last answer, once its text is complete. id: the session's; None without one."""

    id: str | None
    receipt: dict[str, Any]

    def ask(self, question: str, images: Sequence[str] = ()) -> Iterator[str]:
        """Yield the answer's text as it is generated. images: from `image_reference`. Raises CallFailed."""
        ...

    def close(self) -> None:
        """End the conversation, and close its session at the endpoint. Raises CallFailed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTarget:
    """An endpoint, the caller's credentials, and the sampling parameters."""

    url: str
    endpoint: str
    login: Login = field(default_factory=Login)
    parameters: Mapping[str, Any] = field(default_factory=dict)


class EndpointCalls:
    """The calls of both kinds of conversation. show: called with the endpoint's status while an answer is late."""

    def __init__(self, target: ChatTarget, show: Callable[[str], None]) -> None:
        self.target = target
        with readable_errors():  # of boto3's own configuration
            try:
                self.client = make_client(target.url, target.login, Config(read_timeout=READ_TIMEOUT_S))
            except ValueError as error:
                raise ChatError(f"--url must be an http(s) address: {error}") from error
            self._watch = EndpointWatch(target.url, target.endpoint, Signer(target.login), show)

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Translate boto3's errors. The error of an unknown endpoint names the endpoints that there are."""
        try:
            with readable_errors(HINT):
                yield
        except EndpointError as error:
            if NEEDS_TARGET_MODEL in str(error):
                raise ChatError(
                    f"{self.target.endpoint} is an endpoint with many models, not one that chats: call it with boto3's "
                    "TargetModel, or select another with --endpoint"
                ) from error
            names = self._endpoint_names() if error.code == "ValidationError" else []
            if not names or self.target.endpoint in names:
                raise
            raise EndpointError(
                f"{self.target.url} has no endpoint {self.target.endpoint}, but {', '.join(names)}: "
                "select one with --endpoint",
                code=error.code,
            ) from error

    def _endpoint_names(self) -> list[str]:
        """Return the names of the endpoints; none if the address does not list them."""
        config = Config(read_timeout=LIST_TIMEOUT_S, retries={"total_max_attempts": 1})
        try:
            with readable_errors():
                found = make_client(self.target.url, self.target.login, config, SERVICE).list_endpoints(MaxResults=100)
        except EndpointError:
            return []
        return sorted(each["EndpointName"] for each in found["Endpoints"])

    def call(self, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its whole answer."""
        with self._explained_errors(), self._watch.waiting():
            answer: dict[str, Any] = self.client.invoke_endpoint(
                EndpointName=self.target.endpoint,
                ContentType="application/json",
                SessionId=session_id,
                Body=json.dumps(body),
            )
        return answer

    @contextmanager
    def stream(self, body: Mapping[str, Any], **arguments: str) -> Iterator[tuple[Any, Callable[[], None]]]:
        """Yield the streamed answer, and a function to call when its first part has arrived."""
        with self._explained_errors(), self._watch.waiting() as on_answer:
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
    """A session of the endpoint, new or already open."""

    def __init__(self, calls: EndpointCalls, session_id: str | None, images: Sequence[str] = ()) -> None:
        """images: at the beginning of a new session."""
        self._calls = calls
        self.receipt: dict[str, Any] = {}
        if session_id is None:
            body: dict[str, Any] = {"requestType": "NEW_SESSION"}  # start_session needs a picture
            if len(images) == 1:
                body = {"type": "start_session", "image": images[0]}
            elif images:
                body = {"type": "start_session", "images": list(images)}
            stamp = calls.call("NEW_SESSION", body).get("NewSessionId")
            if stamp is None:
                raise ChatError(
                    f"{calls.target.endpoint} is not an endpoint that chats: its model answers, but opens no sessions; "
                    "select another with --endpoint"
                )
            session_id = stamp.partition(";")[0]
        self.id: str | None = session_id

    def ask(self, question: str, images: Sequence[str] = ()) -> Iterator[str]:
        body: dict[str, Any] = {
            "type": "send_text_prompt",
            "prompt_text": question,
            "stream": True,
            "parameters": dict(self._calls.target.parameters),
        }
        if images:
            body["images"] = list(images)
        decoder = codecs.getincrementaldecoder("utf-8")()
        with self._calls.stream(body, SessionId=str(self.id)) as (answer, on_answer):
            self.receipt = read_receipt(answer["ResponseMetadata"]["HTTPHeaders"])
            for event in answer["Body"]:
                on_answer()
                if text := decoder.decode(event["PayloadPart"]["Bytes"]):
                    yield text

    def close(self) -> None:
        try:
            self._calls.call(str(self.id), {"type": "close_session"})
        finally:
            self._calls.client.close()


class MessagesConversation:
    """Messages in OpenAI's form, all sent with each question; there is no session to close."""

    def __init__(self, calls: EndpointCalls, system: str | None, images: Sequence[str] = ()) -> None:
        self._calls = calls
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
        parameters = dict(self._calls.target.parameters)
        if "max_new_tokens" in parameters:
            parameters["max_tokens"] = parameters.pop("max_new_tokens")
        body = {"messages": asked, "stream": True, "stream_options": {"include_usage": True}, **parameters}
        text = ""
        with self._calls.stream(body) as (answer, on_answer):
            self.receipt = read_receipt(answer["ResponseMetadata"]["HTTPHeaders"])
            try:
                for piece in read_event_stream(answer["Body"]):
                    on_answer()
                    if piece.usage is not None:
                        self.receipt["generated_tokens"] = piece.usage.answer_tokens
                    if piece.text:
                        text += piece.text
                        yield piece.text
            except UnreadableStream as error:
                if text:
                    raise
                raise ChatError(
                    f"{self._calls.target.endpoint} is not an endpoint that chats: its model answers, but not with a "
                    f"stream of chat completions ({error}); select another with --endpoint"
                ) from error
        self._messages = [*asked, {"role": "assistant", "content": text}]
        self._first_images = ()

    def close(self) -> None:
        self._calls.client.close()


def image_reference(image: str) -> str:
    """Return an address unchanged, a file as a data URL. Raises ChatError if it cannot be read."""
    try:
        return runtime.image_reference(image)
    except OSError as error:
        raise ChatError(f"cannot read {image}: {error.strerror}") from error
