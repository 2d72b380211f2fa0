"""`torchmoor package`: a model archive. torchmoor.cli.model_archive makes it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from torchmoor.cli.model_archive import package as make_package


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="NAME.tar.gz or NAME.mar (default: the directory's name with .tar.gz, here).",
)
@click.option("--allow-pickle", is_flag=True, help="Include pickled weights, which can run code when they are loaded.")
def package(directory: Path, output: Path | None, allow_pickle: bool) -> None:
    """Package DIRECTORY, a checkpoint written by save_pretrained.

    NAME.tar.gz is for an endpoint with many models, or for SageMaker. NAME.mar of a chat model also contains the chat
    handler, and `up --endpoint NAME` serves it. Files that serving does not need are left out and listed. The same
    files give the same bytes.

    \b
    Examples:
      torchmoor package ./minilm
      torchmoor package ./minilm -o models/minilm-007.tar.gz
      torchmoor package ./my-llava -o my_store/my-llava.mar
      torchmoor up --model-store my_store --endpoint my-llava
    """
    target = output or Path(f"{directory.resolve().name}.tar.gz")
    bar = click.progressbar(length=1, label="torchmoor: packaging", file=sys.stderr)

    def report(done: int, total: int) -> None:
        bar.length = max(total, 1)
        bar.update(done - bar.pos)

    with bar:
        made = make_package(directory, target, allow_pickle=allow_pickle, report=report)
    for name in made.left_out:
        click.echo(f"torchmoor: left out {name}", err=True)
    click.echo(f"{made.path}  {len(made.files)} files  {made.num_bytes} bytes")
    if made.endpoint:
        store = shlex.quote(str(made.path.parent))
        click.echo(f"torchmoor: to serve it: torchmoor up --model-store {store} --endpoint {made.endpoint}", err=True)
