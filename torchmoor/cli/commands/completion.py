"""`torchmoor completion`: click's completion scripts, and where to install them."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PLACES = {
    "bash": "~/.local/share/bash-completion/completions/torchmoor",
    "zsh": "~/.zfunc/_torchmoor  (and in ~/.zshrc: fpath+=~/.zfunc; autoload -Uz compinit; compinit)",
    "fish": "~/.config/fish/completions/torchmoor.fish",
}
VARIABLE = "_TORCHMOOR_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(list(PLACES)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands and options in SHELL.

    The script goes to standard output, and the place to install it to standard error.

    \b
    Examples:
      source <(torchmoor completion bash)     for this shell only
      torchmoor completion bash > ~/.local/share/bash-completion/completions/torchmoor
      torchmoor completion zsh > ~/.zfunc/_torchmoor
      torchmoor completion fish > ~/.config/fish/completions/torchmoor.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click has all of them"
    click.echo(kind(context.find_root().command, {}, "torchmoor", VARIABLE).source())
    click.echo(f"torchmoor: install it as {PLACES[shell]}", err=True)
