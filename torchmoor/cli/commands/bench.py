"""`torchmoor bench`: a load test. torchmoor.bench makes the load."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click

from torchmoor.cli.chat_options import make_login
from torchmoor.cli.exit_status import Exit
from torchmoor.cli.options import Number, endpoint_option, generation_options, keys_option, url_option

USERS = 8
OPEN_USERS = 1000
DURATION_S = 30.0
QUESTIONS = (
    "What is in the picture?",
    "What color is it?",
    "Where in the picture is it?",
    "Describe it once more in other words.",
)


@click.command()
@click.option(
    "--users",
    type=click.IntRange(1, 100_000),
    help=f"Concurrent conversations (default: {USERS}). With --rate, the maximum (default: {OPEN_USERS}); "
    "conversations above it count as failures.",
)
@click.option(
    "--rate",
    type=Number(min=0, min_open=True),
    metavar="PER SECOND",
    help="Open loop: send questions at this rate (Poisson arrivals), without waiting for answers.",
)
@click.option(
    "--duration",
    type=Number(min=0, min_open=True),
    metavar="SECONDS",
    help=f"Send no new questions after this (default: {DURATION_S:g}, unless --requests is given).",
)
@click.option("--requests", "num_requests", type=click.IntRange(1), help="Stop after this number of questions.")
@click.option("--turns", default=4, show_default=True, type=click.IntRange(1), help="Questions per conversation.")
@click.option("--stateless", is_flag=True, help="Send the whole conversation with each question, without a session.")
@click.option("--no-stream", is_flag=True, help="Request whole answers; TTFT, TPOT and ITL are not measured.")
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE|URL",
    help="Use these pictures in turn. Repeatable: with a single picture, the endpoint's cache may answer for all.",
)
@click.option(
    "--question", "questions", multiple=True, help="Ask these in turn, instead of the built-in questions. Repeatable."
)
@click.option(
    "--timeout",
    default=120.0,
    show_default=True,
    type=Number(min=0, min_open=True),
    metavar="SECONDS",
    help="Count an answer as failed after this time without data.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one object with the names of vLLM's serving benchmark.")
@endpoint_option
@url_option
@keys_option
@generation_options
def bench(
    users: int | None,
    rate: float | None,
    duration: float | None,
    num_requests: int | None,
    turns: int,
    stateless: bool,
    no_stream: bool,
    images: tuple[str, ...],
    questions: tuple[str, ...],
    timeout: float,
    as_json: bool,
    endpoint: str,
    url: str,
    keys_file: Path | None,
    parameters: dict[str, Any],
) -> None:
    """Measure a running endpoint from this machine, network included.

    A closed loop (--users) asks the next question after each answer, and finds the highest throughput. An open loop
    (--rate) does not wait for answers, and finds the latency at a given load.

    TTFT is the time from sending to the first part of the answer, TPOT the time per token after it, ITL the time
    between parts, E2EL the time to the last part. Opening and closing sessions is part of the load, but not of these
    times. Other work on this machine affects the result, so run the load on its own machine. Ctrl-C waits for the
    running answers and prints the results so far; a second Ctrl-C exits at once.

    \b
    Examples:
      torchmoor bench --image picture.png
      torchmoor bench --users 32 --duration 60 --max-new-tokens 128
      torchmoor bench --rate 5 --requests 500 --stateless --json > stateless.json
    """
    from torchmoor.bench.client import Plan
    from torchmoor.bench.load import LoadSettings
    from torchmoor.bench.run import run
    from torchmoor.bench.summary import describe
    from torchmoor.cli.conversation import image_reference

    plan = Plan(
        url=url,
        endpoint=endpoint,
        questions=questions or QUESTIONS,
        images=[image_reference(image) for image in images],
        num_turns=turns,
        is_stateless=stateless,
        is_streamed=not no_stream,
        parameters={"max_new_tokens": 64, **parameters},
    )
    settings = LoadSettings(
        users=users or (USERS if rate is None else OPEN_USERS),
        rate=rate,
        num_turns=turns,
        duration_s=DURATION_S if duration is None and num_requests is None else duration,
        num_requests=num_requests,
        seed=int(parameters.get("seed", 0)),
    )
    is_terminal = sys.stderr.isatty()

    def report(line: str) -> None:
        click.echo(f"\r{line:<79}" if is_terminal else line, nl=not is_terminal, err=True)

    try:
        found = asyncio.run(run(plan, settings, make_login(keys_file), timeout, report))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    if is_terminal:
        click.echo(err=True)
    found = {
        "endpoint": endpoint,
        "mode": "stateless" if stateless else "session",
        "is_streamed": not no_stream,
        "turns": turns,
        **found,
    }
    if as_json:
        click.echo(json.dumps(found))
    else:
        for line in describe(found):
            click.echo(line)
    if found["is_interrupted"]:
        raise click.exceptions.Exit(Exit.INTERRUPTED)
    if not found["completed"]:
        raise click.exceptions.Exit(Exit.FAILED)
