"""The flow of `torchmoor chat` and `torchmoor ask`: questions from the terminal, streamed answers."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import click

from torchmoor.cli.conversation import (
    ChatError,
    ChatTarget,
    EndpointCalls,
    SessionConversation,
    image_reference,
)
from torchmoor.cli.foreign_text import without_controls
from torchmoor.clients.errors import CallFailed

HELP = """\
/image PATH   add an image to the next question: a file, or an http(s) or s3 address
/help         print this list
/quit         end the conversation, as Ctrl-D does
Ctrl-C        stop the answer; what is there of it stays in the conversation
Any other line is a question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The command line's options."""

    target: ChatTarget
    images: tuple[str, ...] = ()  # at the beginning of the conversation
    questions: tuple[str, ...] = ()  # empty: read them from standard input
    as_json: bool
    session_id: str | None  # an open session; None: open one
    is_kept: bool  # the session stays open at the end
    system: str


def run(options: ChatOptions) -> None:
    """Hold the conversation, and close its session at the end, also after an error, unless `is_kept`.

    Raises ChatError, CallFailed, KeyboardInterrupt.
    """
    images = [image_reference(image) for image in options.images]  # before anything is sent
    calls = EndpointCalls(options.target, _print_waiting)
    conversation = SessionConversation(calls, options.session_id, images, options.system)
    pending = tuple(images) if options.session_id else ()
    is_kept = options.is_kept and options.session_id is not None  # after an error: a new session's id was not printed
    try:
        if options.questions:
            for question in options.questions:
                _show(conversation, question, pending, options)
                pending = ()
        else:
            _converse(conversation, pending, options)
        if options.is_kept and not options.as_json:
            click.echo(f"Session {conversation.id} stays open: --session {conversation.id}", err=True)
        is_kept = options.is_kept
    finally:
        if not is_kept:
            with suppress(CallFailed):  # the session expires anyway; an error of the conversation matters more
                conversation.close()


def not_text(error: UnicodeDecodeError) -> ChatError:
    """Return the error for standard input that cannot be decoded."""
    return ChatError(f"standard input is not text in {error.encoding.upper()}: convert it first, as with iconv")


def _print_waiting(message: str) -> None:
    click.echo(f"Waiting: {without_controls(message)}", err=True)


def _converse(conversation: SessionConversation, images: Sequence[str], options: ChatOptions) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  (line editing and history for input())

        greeting = "Ask about the image" if options.images else "Ask"
        click.echo(f"{greeting}. /image PATH adds one, /help lists the commands, /quit ends.", err=True)
    num_failed = 0
    prompt = "> " if is_terminal else ""
    while (line := _read_line(prompt)) is not None and line not in ("/quit", "/exit"):
        try:
            if line == "/help":
                click.echo(HELP, err=True)
            elif line.startswith("/image "):
                images = (*images, image_reference(line.removeprefix("/image ").strip()))
            elif line:
                asked, images = images, ()  # a refused image must not fail the next question as well
                with _stopped_by_ctrl_c(conversation) if is_terminal else nullcontext():
                    _show(conversation, line, asked, options)
        except (ChatError, CallFailed) as error:
            click.echo(f"Error: {without_controls(str(error))}", err=True)
            num_failed += 1
    if num_failed and not is_terminal:  # a user has seen the errors; a program needs the exit status
        raise ChatError(f"{num_failed} of the questions failed; the errors are above")


def _read_line(prompt: str) -> str | None:
    """Return the next line of standard input; None at its end, or after Ctrl-C."""
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError as error:
        raise not_text(error) from error


@contextmanager
def _stopped_by_ctrl_c(conversation: SessionConversation) -> Iterator[None]:
    """Let Ctrl-C stop the answer that the block shows. A second one, or one between two answers, ends the command."""
    is_over = threading.Event()

    def stop() -> None:
        try:
            is_stopped = conversation.stop_answer()
        except CallFailed:
            is_stopped = False
        if not is_stopped and not is_over.is_set():
            click.echo("The answer cannot be stopped yet; Ctrl-C again ends the conversation.", err=True)

    def on_interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        threading.Thread(target=stop, name="stop", daemon=True).start()  # the main thread may hold a lock of boto3

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        is_over.set()
        signal.signal(signal.SIGINT, before)


def _show(conversation: SessionConversation, question: str, images: Sequence[str], options: ChatOptions) -> None:
    """Print the answer as it arrives, or as one line of JSON when it is complete.

    A terminal gets no control characters: the model may have read them in an image.
    """
    shown = without_controls if sys.stdout.isatty() else str
    began, first_s, text = time.monotonic(), 0.0, ""
    for piece in conversation.ask(question, images):
        first_s = first_s or time.monotonic() - began
        text += piece
        if not options.as_json:
            click.echo(shown(piece), nl=False)
    if options.as_json:
        whole = {
            "question": question,
            "answer": text,
            "ttft_ms": round(first_s * 1000, 1),
            "latency_ms": round((time.monotonic() - began) * 1000, 1),
            "session_id": conversation.id if options.is_kept else None,
            "receipt": conversation.receipt,
        }
        click.echo(shown(json.dumps(whole, ensure_ascii=False)))
    elif not text.endswith("\n"):
        click.echo()
