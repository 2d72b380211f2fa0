"""The command line as a whole: help, and what a call costs."""

import pytest
from click.testing import CliRunner, Result

from torchmoor.cli import main


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("up", "-h"), ("chat", "--help"), ("serve", "-h")])
def test_every_command_has_help(arguments: tuple[str, ...]) -> None:
    """-h and --help alike."""
    result = invoke(*arguments)

    assert result.exit_code == 0
    assert "Usage:" in result.stdout


@pytest.mark.parametrize("command", ["up", "chat"])
def test_help_shows_examples(command: str) -> None:
    """The fastest way to learn a command is a line to copy."""
    assert f"torchmoor {command} " in invoke(command, "--help").stdout.partition("Examples:")[2]


def test_the_version_is_told() -> None:
    """For a bug report."""
    result = invoke("--version")

    assert result.exit_code == 0
    assert "0.1.0" in result.stdout
