"""Entry of the command line. It lists all commands, and imports only the one that runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from torchmoor.cli.exit_status import reported_by_exit_status
from torchmoor.run.hangups import ignore_hangups
from torchmoor.wire.imports import without_collections

# Summaries are here, so that `torchmoor --help` and completion do not import all commands.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "up": ("up:up", "Start TorchServe instances and the proxy on this machine."),
    "serve": ("serve:serve", "Run the proxy for instances that already run."),
    "status": ("status:status", "List the fleets of `up` on this machine."),
    "logs": ("logs:logs", "Print the log of a fleet or of an instance."),
    "stop": ("stop:stop", "Stop a fleet of `up`."),
    "ask": ("ask:ask", "Ask one question, with or without images."),
    "chat": ("chat:chat", "Chat, with or without an image."),
    "package": ("package:package", "Package a checkpoint as a model archive."),
    "bench": ("bench:bench", "Measure a running endpoint under load."),
    "instances": ("instances:instances", "List instances: state, load, sessions, memory."),
    "drain": ("drain:drain", "Take instances out of service gracefully."),
    "undrain": ("drain:undrain", "Put drained instances back into service."),
    "sessions": ("sessions:sessions", "List, close, pin, unpin open sessions."),
    "models": ("models:models", "List, pin, unpin, prewarm, unload models."),
    "async": ("async_:async_", "List, get, cancel asynchronous requests."),
    "doctor": ("doctor:doctor", "Find problems of this machine or a running fleet."),
    "completion": ("completion:completion", "Print a shell's completion script."),
}
HANDLING_HANGUPS = ("up", "serve")


class Commands(click.Group):
    """Imports a command on demand, since importing all of them takes a second."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        with without_collections():
            command: click.Command = getattr(import_module(f"torchmoor.cli.commands.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in HANDLING_HANGUPS:
            ignore_hangups()  # before the imports, which take a second
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in COMMANDS])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        names = [CompletionItem(name, help=COMMANDS[name][1]) for name in COMMANDS if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        _replace_closed_streams()
        with reported_by_exit_status():  # --help and --version print here
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with reported_by_exit_status():
            return super().invoke(ctx)


def _replace_closed_streams() -> None:
    """Discard output to a stream that is closed, as by `>&-`. No other file may get its descriptor."""
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (until the process ends)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="torchmoor")
@click.pass_context
def main(context: click.Context) -> None:
    """Stateful, streaming multimodal chat on TorchServe behind the SageMaker runtime API.

    \b
    Examples:
      torchmoor up --instances 2
      torchmoor ask "What color is the circle?" picture.png
      torchmoor doctor
    """
    if os.environ.get("NO_COLOR"):
        context.color = False
