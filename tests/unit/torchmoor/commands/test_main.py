"""The command line as a whole: help and the cost of a call."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from scripts.reference.commands import walk
from torchmoor.cli.main import COMMANDS, main
from torchmoor.cli.running_fleets import recorded
from torchmoor.config.launcher import INSTANCE_LOG

ROOT = Path(__file__).parents[4]
# Modules that take longer to import than everything that help and completion need.
SLOW = {"aiohttp", "asyncio", "boto3", "botocore", "httptools", "prometheus_client", "uvloop", "yaml"}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command by its whole name, without the groups."""

    def visit(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from visit(found, f"{path} {name}")
        else:
            yield path, command

    yield from visit(main, "torchmoor")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        *(((*names, option), 0, "Usage:") for names in ((), ("up",), ("chat",)) for option in ("-h", "--help")),
        (("sessions", "list", "-h"), 0, "Usage:"),
        (("--version",), 0, "0.1.0"),
        (("instancse",), 2, "--help"),
    ],
)
def test_help_version_and_unknown_commands(arguments: tuple[str, ...], status: int, said: str) -> None:
    result = invoke(*arguments)

    assert result.exit_code == status
    assert said in (result.stderr if status else result.stdout)


def test_help_shows_examples() -> None:
    """Each command's help has an example that begins with the command's name."""
    without = [
        path for path, text in walk(main, None, "torchmoor") if f"  {path} " not in text.partition("Examples:")[2]
    ]

    assert without == []


def test_help_of_all_fits_a_terminal() -> None:
    """The help of all commands fits 80 columns, one line per command."""
    lines = invoke("--help").stdout.splitlines()

    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[lines.index("Commands:") + 1 :]] == list(COMMANDS)


def test_what_lists_can_give_json() -> None:
    without = {
        path.split()[1]
        for path, command in commands()
        if "--json" not in {option for parameter in command.params for option in parameter.opts}
    }

    assert without == {"up", "serve", "stop", "logs", "package", "completion"}


def test_no_secret_is_an_argument() -> None:
    """Secrets are not arguments, which every process of the machine can read."""
    options = {option for _, command in commands() for parameter in command.params for option in parameter.opts}

    assert not options & {"--token", "--password", "--secret", "--access-key", "--admin-token"}


def test_help_and_completion_import_little() -> None:
    """Help and completion do not import boto3, which would delay them."""
    script = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from torchmoor.cli.main import main\n"
        "run = CliRunner().invoke\n"
        "assert 'instances' in run(main, ['--help']).stdout\n"
        "tab = {'_TORCHMOOR_COMPLETE': 'bash_complete', 'COMP_WORDS': 'torchmoor ins', 'COMP_CWORD': '1'}\n"
        "assert 'plain,instances' in run(main, [], prog_name='torchmoor', env=tab).stdout\n"
        "assert run(main, ['instances', '--help']).exit_code == 0\n"
        f"print(sorted({SLOW!r} & set(sys.modules)))\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)

    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("torchmoor ask --endpoint ll", ["llama", "llava"]),
        ("torchmoor drain lla", ["llava-0", "llava-1"]),
        ("torchmoor logs llava-1", ["llava-1"]),
        ("torchmoor logs other", []),
    ],
)
def test_names_of_endpoints_and_instances_are_completed(
    words: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completion offers endpoints and instances of the fleets that this user runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("llava-0", "llava-1"):
        log = tmp_path / "run" / name / INSTANCE_LOG
        log.parent.mkdir(parents=True)
        log.touch()
    fields = {"runtime": "http://127.0.0.1:8080", "admin": "http://127.0.0.1:8081"}
    announced = json.dumps({**fields, "endpoints": ["llava", "llama", "many"], "run_dir": str(tmp_path / "run")})
    tab = {
        "_TORCHMOOR_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }

    with recorded(announced):
        done = CliRunner().invoke(main, [], prog_name="torchmoor", env=tab)

    assert done.stdout.split() == [f"plain,{name}" for name in names]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_shells_own_script(shell: str) -> None:
    """Completion prints the shell's script, and on standard error where to put it, so that it can be redirected."""
    result = invoke("completion", shell)

    assert result.exit_code == 0
    assert f"_TORCHMOOR_COMPLETE={shell}_complete" in result.stdout
    assert "install it as ~/" in result.stderr


def test_a_command_whose_packages_are_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchmoor[client]` has the command line, but neither the proxy's packages nor the instances'."""
    monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.delitem(sys.modules, "torchmoor.cli.commands.up", raising=False)

    result = invoke("up")

    assert result.exit_code == 1
    assert "uvloop is not installed" in result.stderr
    assert "pip install 'torchmoor[serve]'" in result.stderr
