"""`torchmoor chat`: a conversation in the terminal, through boto3's own SageMaker runtime client."""

from __future__ import annotations

import codecs
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import boto3
import click
from botocore.config import Config
from botocore.credentials import Credentials

from torchmoor.chat_progress import Progress
from torchmoor.clients import runtime
from torchmoor.clients.errors import EndpointError
from torchmoor.clients.runtime import readable_errors
from torchmoor.errors import TorchmoorError

READ_TIMEOUT_S = 120


class ChatError(TorchmoorError):
    """The conversation cannot go on; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What the command line says."""

    image: str | None  # None: a conversation that begins without a picture
    endpoint_url: str
    endpoint: str
    questions: tuple[str, ...]
    parameters: Mapping[str, Any]
    as_json: bool


class ChatSession:
    """One session of the endpoint, from opening to close."""

    def __init__(self, options: ChatOptions) -> None:
        self._endpoint = options.endpoint
        self._parameters = dict(options.parameters)
        self._client, credentials = make_client(options.endpoint_url)
        region = self._client.meta.region_name
        self._progress = Progress(options.endpoint_url, options.endpoint, credentials, region, _tell)
        body = {"requestType": "NEW_SESSION"}  # start_session insists on a picture
        if options.image is not None:
            body = {"type": "start_session", "image": image_reference(options.image)}
        opened = self._invoke("NEW_SESSION", body)
        self.id: str = opened["NewSessionId"].partition(";")[0]

    def ask(self, question: str, images: tuple[str, ...] = ()) -> Iterator[str]:
        """The answer's text in pieces, as it is generated. Raises ChatError.

        images: as `image_reference` gives them.
        """
        body = {"type": "send_text_prompt", "prompt_text": question, "stream": True, "parameters": self._parameters}
        if images:
            body["images"] = list(images)
        decoder = codecs.getincrementaldecoder("utf-8")()
        with _readable_errors(), self._progress.waiting() as on_answer:
            answer = self._client.invoke_endpoint_with_response_stream(
                EndpointName=self._endpoint,
                ContentType="application/json",
                SessionId=self.id,
                Body=json.dumps(body),
            )
            for event in answer["Body"]:
                on_answer()
                if text := decoder.decode(event["PayloadPart"]["Bytes"]):
                    yield text

    def close(self) -> None:
        """Free the session's memory. Raises ChatError."""
        try:
            self._invoke(self.id, {"type": "close_session"})
        finally:
            self._client.close()

    def _invoke(self, session_id: str, body: dict[str, Any]) -> dict[str, Any]:
        with _readable_errors(), self._progress.waiting():
            answer: dict[str, Any] = self._client.invoke_endpoint(
                EndpointName=self._endpoint, ContentType="application/json", SessionId=session_id, Body=json.dumps(body)
            )
        return answer


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Turns what boto3 raises into a ChatError."""
    try:
        with readable_errors(" (is `torchmoor up` running?)"):
            yield
    except EndpointError as error:
        raise ChatError(str(error)) from error


def _tell(news: str) -> None:
    click.echo(f"Waiting: {news}", err=True)


def make_client(endpoint_url: str) -> tuple[Any, Credentials]:
    """boto3's client and the keys that it signs with. Raises ChatError if the address is none."""
    try:
        client = runtime.make_client(endpoint_url=endpoint_url, config=Config(read_timeout=READ_TIMEOUT_S))
    except ValueError as error:
        raise ChatError(f"--endpoint-url must be an http(s) address: {error}") from error
    return client, boto3.Session().get_credentials() or Credentials("local", "local")


def image_reference(image: str) -> str:
    """An address as it is, a file as a data URL. Raises ChatError if it cannot be read."""
    try:
        return runtime.image_reference(image)
    except OSError as error:
        raise ChatError(f"cannot read {image}: {error.strerror}") from error


def run(options: ChatOptions) -> None:
    """The whole conversation. Raises ChatError."""
    session = ChatSession(options)
    try:
        if options.questions:
            for question in options.questions:
                _show(session, question, (), as_json=options.as_json)
        else:
            _converse(session, has_picture=options.image is not None, as_json=options.as_json)
    finally:
        with suppress(ChatError):  # the session ends by itself, and an error above matters more
            session.close()


def _converse(session: ChatSession, *, has_picture: bool, as_json: bool) -> None:
    images: tuple[str, ...] = ()
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  (line editing and history for input())

        greeting = "Ask about the picture" if has_picture else "Ask"
        click.echo(f"{greeting}. /image PATH adds one, /quit ends.", err=True)
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line in ("/quit", "/exit"):
            return
        try:
            if line.startswith("/image "):
                images += (image_reference(line.removeprefix("/image ").strip()),)
            elif line:
                asked, images = images, ()  # a picture that is refused must not spoil the next question too
                _show(session, line, asked, as_json=as_json)
        except ChatError as error:
            click.echo(f"Error: {error}", err=True)


def _show(session: ChatSession, question: str, images: tuple[str, ...], *, as_json: bool) -> None:
    """Print the answer as it comes, or one line of JSON when it is complete."""
    began, first_s, text = time.monotonic(), 0.0, ""
    for piece in session.ask(question, images):
        first_s = first_s or time.monotonic() - began
        text += piece
        if not as_json:
            click.echo(piece, nl=False)
    if as_json:
        click.echo(json.dumps({"question": question, "answer": text, "ttft_ms": round(first_s * 1000, 1)}))
    else:
        click.echo()
