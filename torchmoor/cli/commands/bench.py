"""`torchmoor bench`: a load test. torchmoor.bench makes the load."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import click

from torchmoor.bench.load import DURATION_S, OPEN_USERS, USERS, LoadSettings
from torchmoor.cli.chat_options import target_options
from torchmoor.cli.conversation import ChatTarget, image_reference
from torchmoor.cli.exit_status import ExitStatus
from torchmoor.cli.foreign_text import without_controls
from torchmoor.cli.options import Number, show
from torchmoor.cli.setting_option import given_settings, setting

QUESTIONS = (
    "What is in the picture?",
    "What color is it?",
    "Where in the picture is it?",
    "Describe it once more in other words.",
)


option = partial(setting, LoadSettings)


@click.command()
@option("users", "--users", type=click.IntRange(1, 100_000), default=None, show_default=False)
@option("rate", "--rate", type=Number(min=0, min_open=True), metavar="PER SECOND")
@option("duration_s", "--duration", type=Number(min=0, min_open=True), metavar="SECONDS")
@option("num_requests", "--requests", type=click.IntRange(1))
@option("num_turns", "--turns")
@click.option("--stateless", is_flag=True, help="Send the whole conversation with each question, without a session.")
@click.option("--no-stream", is_flag=True, help="Request whole answers; TTFT, TPOT and ITL are not measured.")
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE|URL",
    help="Use these images in turn. Repeatable: with a single image, the endpoint's cache may answer for all.",
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
@target_options
def bench(
    stateless: bool,
    no_stream: bool,
    images: tuple[str, ...],
    questions: tuple[str, ...],
    timeout: float,
    as_json: bool,
    target: ChatTarget,
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
    from torchmoor.bench.client import ConversationPlan
    from torchmoor.bench.run import run
    from torchmoor.bench.summary import describe

    given = given_settings()
    limit = {} if given.keys() & {"duration_s", "num_requests"} else {"duration_s": DURATION_S}
    users = OPEN_USERS if "rate" in given else USERS
    seed = int(target.parameters.get("seed", 0))
    settings = LoadSettings.read({"users": users, **limit, "seed": seed, **given})
    plan = ConversationPlan(
        url=target.url,
        endpoint=target.endpoint,
        questions=questions or QUESTIONS,
        images=[image_reference(image) for image in images],
        num_turns=settings.num_turns,
        is_stateless=stateless,
        is_streamed=not no_stream,
        parameters={"max_new_tokens": 64, **target.parameters},
    )
    is_terminal = sys.stderr.isatty()

    def report(line: str) -> None:
        click.echo(f"\r{line:<79}" if is_terminal else line, nl=not is_terminal, err=True)

    try:
        found = asyncio.run(run(plan, settings, target.login, timeout, report))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    if is_terminal:
        click.echo(err=True)
    found = {
        "endpoint": target.endpoint,
        "mode": "stateless" if stateless else "session",
        "is_streamed": not no_stream,
        "turns": settings.num_turns,
        **found,
    }
    show(found, lambda: map(without_controls, describe(found)), as_json=as_json)
    if found["is_interrupted"]:
        raise click.exceptions.Exit(ExitStatus.INTERRUPTED)
    if not found["completed"]:
        raise click.exceptions.Exit(ExitStatus.FAILED)
