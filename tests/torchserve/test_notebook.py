"""Execute examples/sticky_session.ipynb unchanged; only the environment states the endpoint."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torchserve.conftest import ROOT, Fleet

pytestmark = pytest.mark.torchserve
NOTEBOOK = ROOT / "examples" / "sticky_session.ipynb"
# Values that differ between runs: ids, times of day, milliseconds.
VARYING = re.compile(r"ts-seq-[\w-]+|\d{4}-\d\d-\d\dT[\d:]+Z|\d+\.\d ms")


def execute(fleet: Fleet, output: Path) -> Path:
    """Return a copy with the outputs of a run."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    environment |= {
        "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": fleet.runtime,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "IPYTHONDIR": str(output.parent / "ipython"),
    }
    done = subprocess.run(
        [Path(sys.executable).with_name("jupyter-execute"), NOTEBOOK, f"--output={output}"],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return output


def texts(notebook: Path) -> list[str]:
    """Return the printed output of each code cell."""
    cells: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return [
        "".join("".join(output.get("text", ())) for output in cell["outputs"])
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def test_notebook_runs_and_its_answers_are_right(fleet: Fleet, tmp_path: Path) -> None:
    """The notebook runs with plain boto3, and its saved outputs are those of such a run."""
    _, opened, asked, streamed, closed, expiring, refused = printed = texts(execute(fleet, tmp_path / "run.ipynb"))

    assert re.fullmatch(r"\d+ bytes opened ts-seq-[\w-]+\nwhich ends at [\d-]+T[\d:]+Z\n", opened)
    color, shape, number = asked.splitlines()
    assert color.endswith("-> The circle is red.")
    assert "circle" in shape.partition("->")[2]
    assert "one" in number.partition("->")[2]
    star, square, place = streamed.splitlines()[2:]
    assert "yellow" in star
    assert "square" in square.partition("->")[2]
    assert "top left" in place
    assert all(re.search(r"\(first piece after \d+\.\d ms\)$", line) for line in (star, square, place))
    assert closed == "{'success': True} True\n"
    assert expiring.startswith("ends at 20")
    mistakes = dict(line.split(": ", 1) for line in refused.splitlines()[:-1])
    assert mistakes["closed"] == "ValidationError: this session was closed; open a new one"
    assert mistakes["expired"] == "ValidationError: this session has expired; open a new one"
    assert mistakes["not an id of ours"].startswith("ValidationError: The session id is not valid")
    assert mistakes["no question"] == "ModelError: 'prompt_text' must be a text that is not empty"
    assert mistakes["no picture"].startswith("ModelError: the bytes are no image of a known format")
    kept = texts(NOTEBOOK)
    assert [VARYING.sub("#", text) for text in kept] == [VARYING.sub("#", text) for text in printed]
