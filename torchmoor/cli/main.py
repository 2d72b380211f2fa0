"""The command line's entry. It knows the commands by name and imports the one that is meant."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from torchmoor.cli.exit_status import told_by_exit_status

# What each does, here too, so that `torchmoor --help` and completion need not import them all.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "up": ("up:up", "Start TorchServe instances and the proxy on this machine."),
    "serve": ("serve:serve", "Run the proxy before instances that run already."),
    "ask": ("ask:ask", "Ask one question, with pictures or without."),
    "chat": ("chat:chat", "Talk about a picture, or about anything."),
    "package": ("package:package", "Make a model archive of a checkpoint."),
    "bench": ("bench:bench", "Measure a running endpoint under load."),
    "instances": ("instances:instances", "List instances: state, load, sessions, memory."),
    "drain": ("drain:drain", "Take instances out of service without harm."),
    "undrain": ("drain:undrain", "Give drained instances work again."),
    "sessions": ("sessions:sessions", "List, close, pin open sessions."),
    "models": ("models:models", "List, pin, prewarm, unload models."),
    "async": ("async_:async_", "List, see, cancel, fetch asynchronous requests."),
    "doctor": ("doctor:doctor", "Find what would keep a fleet from running here."),
    "completion": ("completion:completion", "Print what completes commands in a shell."),
}


class Commands(click.Group):
    """Imports a command when it is asked for: all of them together take a second."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"torchmoor.cli.commands.{module}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in COMMANDS])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        names = [CompletionItem(name, help=COMMANDS[name][1]) for name in COMMANDS if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        with told_by_exit_status():
            return super().invoke(ctx)


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
