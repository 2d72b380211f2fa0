"""Run the examples of README.md and of pages in docs/ unchanged, except for the address.

tests/documented runs all of README.md, with its shell commands, and the shell commands of more pages.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchserve.conftest import ROOT, Fleet
from tests.torchserve.test_sdk_clients import require_clients
from tests.waiting import PROGRAM_S

pytestmark = pytest.mark.torchserve
README = ROOT / "README.md"
RUNTIME_API = ROOT / "docs" / "runtime-api.md"
CLIENTS = ROOT / "docs" / "clients.md"
RESPONSES = ROOT / "docs" / "responses.md"
STRUCTURED_OUTPUT = ROOT / "docs" / "structured-output.md"


def blocks(path: Path, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    assert found
    return found


def run(fleet: Fleet, program: str, script: str) -> str:
    """Run a script beside README.md against the fleet and return its output."""
    address = fleet.runtime.removeprefix("http://")
    script = re.sub(r"(localhost|127\.0\.0\.1):8080", address, script)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "PYTHON"))}
    done = subprocess.run(
        [program, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PROGRAM_S, env=environment
    )
    assert done.returncode == 0, f"{script}\n{done.stderr[-3000:]}"
    return done.stdout


def shell(fleet: Fleet, script: str) -> str:
    return run(fleet, "bash", "set -euo pipefail\n" + script.replace("curl ", "curl --fail -sS "))


@pytest.mark.needs("curl")
def test_shell_commands_of_the_api_work(fleet: Fleet) -> None:
    """The API's shell commands stream every dialect and use a session."""
    inputs, chat, session = (shell(fleet, block) for block in blocks(RUNTIME_API, "sh"))

    assert '"generated_text":"' in inputs
    assert '" red"' in chat
    assert chat.endswith("data: [DONE]\n\n")
    assert session.startswith("The circle is red.data:{")
    assert session.count('"generated_text":"The circle is red."') == 2


@pytest.mark.needs("curl")
def test_shell_command_of_structured_output_works(fleet: Fleet) -> None:
    """The answer is one of the three words that the page's grammar allows."""
    [block] = blocks(STRUCTURED_OUTPUT, "sh")

    assert re.fullmatch(r'\[\{"generated_text":"(red|green|blue)"\}\]', shell(fleet, block).replace(" ", ""))


def test_python_of_structured_output_works(fleet: Fleet) -> None:
    """An answer has the fields of the page's class, and a custom tool's input matches the page's pattern."""
    answer = run(fleet, sys.executable, "\n".join(blocks(STRUCTURED_OUTPUT, "python")))

    shape, query = answer.splitlines()
    assert re.fullmatch(r"kind='(circle|square)' colour='(red|green|blue)'", shape)
    assert re.fullmatch(r"SELECT \w{1,20} FROM \w{1,20}", query)


def test_python_of_the_responses_works(fleet: Fleet) -> None:
    """The examples run one after the other: a chain, a background response, items by their ids, a WebSocket."""
    chained, in_background = run(fleet, sys.executable, "\n".join(blocks(RESPONSES, "python"))).splitlines()

    assert re.fullmatch(r".*circle.* [1-9]\d*", chained)
    assert in_background


def test_python_of_the_api_works(fleet: Fleet) -> None:
    """The API's Python examples run: boto3, OpenAI and Hugging Face; the SageMaker SDK in its own environment."""
    connect, predict, ask, turns = blocks(RUNTIME_API, "python")

    answer, _, streamed = run(fleet, sys.executable, connect + ask).partition("\n")

    assert answer
    assert streamed
    assert len(run(fleet, sys.executable, f"{ask}\nprint()\n{turns}").splitlines()) == 3
    assert run(fleet, str(require_clients()), predict)


def test_python_of_the_readme_works(fleet: Fleet) -> None:
    """The README's Python examples run: a session with boto3, and OpenAI's client."""
    boto3_session, openai_chat = blocks(README, "python")

    answers = run(fleet, sys.executable, f"{boto3_session}\nprint()\n{openai_chat}").split("\n")

    assert answers[0] == "The image shows a red circle in the center."
    assert answers[1] == "The circle is red."


def test_python_of_the_clients_works(fleet: Fleet) -> None:
    """The clients' examples run: the stream reader over HTTP and boto3; LangChain in its own environment."""
    over_http, over_boto3, chat, waiting = blocks(CLIENTS, "python")

    assert run(fleet, sys.executable, over_http)
    streamed = run(fleet, sys.executable, over_boto3)
    answers = run(fleet, str(require_clients()), chat).splitlines()
    waited = run(fleet, str(require_clients()), waiting)

    assert answers[0].startswith("The circle is red. {'input_tokens': ")
    assert answers[1] == "The circle is redThe circle is red."
    assert "circle" in answers[2]
    assert waited == streamed + "\n"
