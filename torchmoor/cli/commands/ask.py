"""`torchmoor ask`: one question. torchmoor.cli.chat has the flow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from torchmoor.cli.chat import ChatOptions, run
from torchmoor.cli.chat_options import conversation_options, make_target


@click.command()
@click.argument("question")
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as one line of JSON, with its receipt.")
@conversation_options
def ask(
    question: str,
    images: tuple[str, ...],
    as_json: bool,
    url: str,
    keys_file: Path | None,
    endpoint: str,
    parameters: dict[str, Any],
    session_id: str | None,
    keep: bool,
    system: str | None,
) -> None:
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
        question = sys.stdin.read().strip()
    if not question:
        raise click.UsageError("the question is empty")
    options = ChatOptions(
        target=make_target(url, endpoint, keys_file, parameters),
        images=images,
        questions=(question,),
        as_json=as_json,
        session_id=session_id,
        is_kept=keep,
        system=system,
    )
    run(options)
