"""`torchmoor ask`: one question. torchmoor.cli.terminal_chat has the flow."""

from __future__ import annotations

import sys
from dataclasses import replace

import click

from torchmoor.cli.chat_options import conversation_options
from torchmoor.cli.terminal_chat import ChatOptions, not_text, run


@click.command()
@click.argument("question")
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as one line of JSON, with its receipt.")
@conversation_options
def ask(question: str, images: tuple[str, ...], options: ChatOptions) -> None:
    """Ask one QUESTION, with or without IMAGEs (files, http(s) or s3 addresses); `-` reads it from standard input.

    Standard output has only the answer's text, as it is generated.

    \b
    Examples:
      torchmoor ask "What color is the circle?" picture.png
      torchmoor ask "What is different?" before.png https://example.com/after.png
      git diff | torchmoor ask - --endpoint llm --system "You review code." > review.txt
      torchmoor ask "Where is it?" picture.png --json | jq .receipt
      torchmoor ask "What is this?" picture.png --keep     then: torchmoor ask "And that?" --session ID
    """
    if question == "-":
        if sys.stdin is None:
            raise click.UsageError("standard input is closed: there is no question to read from it")
        try:
            question = sys.stdin.read().strip()
        except UnicodeDecodeError as error:
            raise not_text(error) from error
    if not question.strip():
        raise click.UsageError("the question is empty")
    run(replace(options, images=images, questions=(question,)))
