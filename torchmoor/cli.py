"""The command line's entry. It knows the commands by name and imports the one that is meant."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import click

# The first line of each command's help, here too, so that `torchmoor --help` need not import them all.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "async": (
        "torchmoor.commands.async_:async_",
        "Look after asynchronous requests: list them, see one, cancel one, fetch a result.",
    ),
    "chat": (
        "torchmoor.commands.chat:chat",
        "Talk about IMAGE, a file or an http(s) address, with streamed answers; without one, about anything.",
    ),
    "package": (
        "torchmoor.commands.package:package",
        "Make a model archive of DIRECTORY, a checkpoint as save_pretrained writes it, for an endpoint of many models.",
    ),
    "serve": (
        "torchmoor.commands.serve:serve",
        "Run the front proxy before TorchServe instances that run already, until Ctrl-C.",
    ),
    "up": (
        "torchmoor.commands.up:up",
        "Start TorchServe instances and the front proxy on this machine, and serve until Ctrl-C.",
    ),
}


class Commands(click.Group):
    """Imports a command when it is asked for: all of them together take a second."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="torchmoor")
def main() -> None:
    """Stateful, streaming multimodal chat on TorchServe behind the SageMaker runtime API."""
