"""Sessions of an endpoint through boto3's SageMaker runtime client, for `ask` and `chat`."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from botocore.config import Config

from torchmoor.cli.waiting_notice import EndpointWatch
from torchmoor.clients import runtime
from torchmoor.clients.errors import EndpointError
from torchmoor.clients.runtime import readable_errors
from torchmoor.clients.signing import SERVICE, Login, Signer, make_client
from torchmoor.errors import TorchmoorError
from torchmoor.wire.receipt import read_receipt

READ_TIMEOUT_S = 120
LIST_TIMEOUT_S = 5
MAX_SHOWN = 60  # characters of a text that cannot be sent
HINT = " (is `torchmoor up` running, and is this its --url?)"


# SageMaker's words, which the proxy uses.
NEEDS_TARGET_MODEL = "missing a target model header"
HAS_NO_ADAPTERS = "does not support target model header"
NONE_READY = "No instance of the endpoint is ready"


class ChatError(TorchmoorError):
    """Raised if a question cannot be sent; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTarget:
    """An endpoint, the caller's credentials, the sampling parameters, and the adapter of new sessions, if any."""

    url: str
    endpoint: str
    login: Login
    parameters: Mapping[str, Any]
    adapter: str = ""


class EndpointCalls:
    """The calls of a conversation. show: called with the endpoint's status while an answer is late."""

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
        """Translate boto3's errors.

        The error for an unknown endpoint lists the endpoints; that for an endpoint without a ready instance lists the
        instances that are starting.
        """
        try:
            with readable_errors(HINT):
                yield
        except EndpointError as error:
            if NEEDS_TARGET_MODEL in str(error):
                raise ChatError(
                    f"{self.target.endpoint} is an endpoint with many models, not a chat endpoint: call it with "
                    "boto3's TargetModel, or select another with --endpoint"
                ) from error
            if HAS_NO_ADAPTERS in str(error):
                raise ChatError(
                    f"{self.target.endpoint} has no adapters: leave --adapter out, or start the fleet with "
                    "`torchmoor up --adapters`"
                ) from error
            if NONE_READY in str(error) and (starting := self._watch.progress()):
                raise EndpointError(f"{error} ({'; '.join(starting)})", code=error.code) from error
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

    def call(self, session_id: str, body: Mapping[str, Any], **members: str) -> dict[str, Any]:
        """Send a request and return its whole answer. members: further members of InvokeEndpoint."""
        with self._explained_errors(), self._watch.waiting():
            answer: dict[str, Any] = self.client.invoke_endpoint(
                EndpointName=self.target.endpoint,
                ContentType="application/json",
                SessionId=session_id,
                Body=json.dumps(body),
                **members,
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
    """A session of the endpoint, new or already open. receipt: of the last answer, once its text is complete."""

    def __init__(self, calls: EndpointCalls, session_id: str | None, images: Sequence[str], system: str) -> None:
        """images: of a new session. system: the system message, sent with the questions."""
        _check_text(system)
        self._calls = calls
        self._system = system
        self.receipt: dict[str, Any] = {}
        if session_id is None:
            body: dict[str, Any] = {"requestType": "NEW_SESSION"}  # start_session needs an image
            if len(images) == 1:
                body = {"type": "start_session", "image": images[0]}
            elif images:
                body = {"type": "start_session", "images": list(images)}
            members = {"TargetModel": calls.target.adapter} if calls.target.adapter else {}
            stamp = calls.call("NEW_SESSION", body, **members).get("NewSessionId")
            if stamp is None:
                raise ChatError(
                    f"{calls.target.endpoint} is not a chat endpoint: its model answers, but opens no sessions; "
                    "select another with --endpoint"
                )
            session_id = stamp.partition(";")[0]
        self.id = session_id

    def ask(self, question: str, images: Sequence[str] = ()) -> Iterator[str]:
        """Yield the answer's text as it is generated. images: from `image_reference`. Raises CallFailed, ChatError."""
        _check_text(question)
        body: dict[str, Any] = {
            "type": "send_text_prompt",
            "prompt_text": question,
            "stream": True,
            "parameters": dict(self._calls.target.parameters),
        }
        if images:
            body["images"] = list(images)
        if self._system:
            body["system"] = self._system
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with self._calls.stream(body, SessionId=self.id) as (answer, on_answer):
            self.receipt = read_receipt(answer["ResponseMetadata"]["HTTPHeaders"])
            for event in answer["Body"]:
                on_answer()
                if text := decoder.decode(event["PayloadPart"]["Bytes"]):
                    yield text
            if text := decoder.decode(b"", final=True):
                yield text

    def stop_answer(self) -> bool:
        """End the answer that `ask` receives; False if none has begun. Call from another thread. Raises CallFailed."""
        answer = self._calls.call(self.id, {"type": "stop_answer"})
        try:
            return bool(json.loads(answer["Body"].read())["stopped"])
        except (ValueError, KeyError, TypeError):  # of another handler than ours
            return False

    def close(self) -> None:
        """End the session. Raises CallFailed."""
        try:
            self._calls.call(self.id, {"type": "close_session"})
        finally:
            self._calls.client.close()


def _check_text(text: str) -> None:
    """Raise ChatError for lone surrogates: bytes that are not UTF-8, of an argument, or read in the locale C."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ChatError(f"{text[:MAX_SHOWN]!r} is not text in UTF-8: convert it first, as with iconv") from error


def image_reference(image: str) -> str:
    """Return an address unchanged, a file as a data URL. Raises ChatError if it cannot be read."""
    try:
        return runtime.image_reference(image)
    except OSError as error:
        raise ChatError(f"cannot read {image}: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:  # of a path: no such user's home, a null character
        raise ChatError(f"cannot read {image}: {error}") from error
