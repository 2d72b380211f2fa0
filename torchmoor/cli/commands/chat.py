"""`torchmoor chat`: a conversation. torchmoor.cli.terminal_chat has the flow."""

from __future__ import annotations

import sys
from dataclasses import replace

import click

from torchmoor.cli.chat_options import conversation_options
from torchmoor.cli.terminal_chat import ChatOptions, run


@click.command()
@click.argument("image", required=False)
@click.option(
    "--ask",
    multiple=True,
    metavar="QUESTION",
    help="Ask this question and exit, instead of a conversation. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per answer, with its receipt.")
@conversation_options
def chat(image: str | None, ask: tuple[str, ...], options: ChatOptions) -> None:
    """Chat with streamed answers, about IMAGE (a file or an http(s) address) or without one.

    In the conversation, /image PATH adds an image, /help lists the commands and /quit ends. Ctrl-C stops an answer, and
    ends the conversation between two answers.

    \b
    Examples:
      torchmoor chat picture.png
      torchmoor chat --endpoint llm
      torchmoor chat picture.png --ask "What color is the circle?" --ask "Where is it?"
    """
    if not ask and sys.stdin is None:
        raise click.UsageError("standard input is closed: give the questions with --ask")
    run(replace(options, images=() if image is None else (image,), questions=ask))
