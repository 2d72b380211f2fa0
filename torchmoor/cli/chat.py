"""`torchmoor chat` and `torchmoor ask`: questions from the terminal, answers as they are generated."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import click

from torchmoor.cli.conversation import (
    ChatError,
    Conversation,
    Line,
    MessagesConversation,
    SessionConversation,
    Target,
    image_reference,
)
from torchmoor.clients.errors import CallFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What the command line says."""

    target: Target
    images: tuple[str, ...]  # that the conversation begins with
    questions: tuple[str, ...]  # empty: a person types them
    as_json: bool
    session_id: str | None = None  # one that is open; None: a new one
    is_kept: bool = False  # the session stays open at the end
    system: str | None = None


def run(options: ChatOptions) -> None:
    """The whole conversation. Its session is closed however it ends, unless it is to be kept.

    Raises ChatError, CallFailed, KeyboardInterrupt.
    """
    images = [image_reference(image) for image in options.images]  # before anything is sent
    line = Line(options.target, _tell)
    conversation: Conversation
    pending: tuple[str, ...] = ()
    if options.system is not None:
        conversation = MessagesConversation(line, options.system, images)
    else:
        conversation = SessionConversation(line, options.session_id, images)
        pending = tuple(images) if options.session_id else ()
    try:
        if options.questions:
            for question in options.questions:
                _show(conversation, question, pending, options)
                pending = ()
        else:
            _converse(conversation, pending, options)
        if options.is_kept and not options.as_json:
            click.echo(f"Session {conversation.id} stays open: --session {conversation.id}", err=True)
    except BaseException:
        # It ends by itself, and the error matters more. Nobody was told the id of a new one.
        if options.session_id is None or not options.is_kept:
            with suppress(CallFailed):
                conversation.close()
        raise
    if not options.is_kept:
        with suppress(CallFailed):
            conversation.close()


def _tell(news: str) -> None:
    click.echo(f"Waiting: {news}", err=True)


def _converse(conversation: Conversation, images: Sequence[str], options: ChatOptions) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  (line editing and history for input())

        greeting = "Ask about the picture" if options.images else "Ask"
        click.echo(f"{greeting}. /image PATH adds one, /quit ends.", err=True)
    num_failed = 0
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if line in ("/quit", "/exit"):
            break
        try:
            if line.startswith("/image "):
                images = (*images, image_reference(line.removeprefix("/image ").strip()))
            elif line:
                asked, images = images, ()  # a picture that is refused must not spoil the next question too
                _show(conversation, line, asked, options)
        except (ChatError, CallFailed) as error:
            click.echo(f"Error: {error}", err=True)
            num_failed += 1
    if num_failed and not is_terminal:  # a person has seen it, and asked again or not; a program has the exit status
        raise ChatError(f"of what was to be done {num_failed} failed, as told above")


def _show(conversation: Conversation, question: str, images: Sequence[str], options: ChatOptions) -> None:
    """Print the answer as it comes, or one line of JSON when it is complete."""
    began, first_s, text = time.monotonic(), 0.0, ""
    for piece in conversation.ask(question, images):
        first_s = first_s or time.monotonic() - began
        text += piece
        if not options.as_json:
            click.echo(piece, nl=False)
    if options.as_json:
        whole = {
            "question": question,
            "answer": text,
            "ttft_ms": round(first_s * 1000, 1),
            "latency_ms": round((time.monotonic() - began) * 1000, 1),
            "session_id": conversation.id if options.is_kept else None,
            "receipt": conversation.receipt,
        }
        click.echo(json.dumps(whole, ensure_ascii=False))
    elif not text.endswith("\n"):
        click.echo()
