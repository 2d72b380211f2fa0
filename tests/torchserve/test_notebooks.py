"""Execute the notebooks of examples/ unchanged against `torchmoor up --control-plane`.

Only the environment states the addresses, of the control plane and of a store.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import S3Server
from tests.torchserve.conftest import ROOT, Fleet, run_fleet
from tests.torchserve.test_sdk_clients import require_clients
from tests.waiting import PROGRAM_S

pytestmark = [pytest.mark.slow, pytest.mark.torchserve, pytest.mark.s3]
EXAMPLES = ROOT / "examples"
BUCKET = "torchmoor-examples"
# Values that differ between runs: ids, counts under load, times of day, milliseconds.
VARYING = re.compile(r"ts-seq-[\w-]+|\d+ of \d+|\d{4}-\d\d-\d\dT[\d:]+Z|\d+\.\d ms")
Execute = Callable[..., list[str]]


@pytest.fixture(scope="module")
def plane(archives: Path, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run `torchmoor up --control-plane` for all notebooks."""
    folder = tmp_path_factory.mktemp("notebooks")
    s3 = s3_server.client()
    s3.create_bucket(Bucket=BUCKET)
    s3.close()
    environment = s3_server.environment
    with run_fleet("--control-plane", run_dir=folder / "run", log=folder / "up.log", environment=environment) as fleet:
        yield fleet


@pytest.fixture
def execute(plane: Fleet, s3_server: S3Server, tmp_path: Path) -> Execute:
    """Return a function that runs a notebook and returns what each code cell printed.

    The saved outputs must be those of such a run, and nothing that the notebook creates may stay.
    """

    def run(name: str, *options: str, **variables: str) -> list[str]:
        notebook, output = EXAMPLES / name, tmp_path / name
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        environment |= s3_server.environment
        environment |= {
            "AWS_ENDPOINT_URL": plane.runtime,
            "AWS_DEFAULT_REGION": "us-east-1",
            "IPYTHONDIR": str(tmp_path / "ipython"),
        }
        done = subprocess.run(
            [Path(sys.executable).with_name("jupyter-execute"), notebook, f"--output={output}", *options],
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            env={**environment, **variables},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert plane.instances() == []
        kept, printed = texts(notebook), texts(output)
        assert [VARYING.sub("#", text) for text in kept] == [VARYING.sub("#", text) for text in printed]
        return printed

    return run


def texts(notebook: Path) -> list[str]:
    """Return the printed output of each code cell."""
    cells: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return [
        "".join("".join(output.get("text", ())) for output in cell["outputs"])
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def test_a_session_stays_where_its_image_is(execute: Execute) -> None:
    _, created, opened, asked, streamed, closed, expiring, refused, deleted = execute("sticky_session.ipynb")

    assert created == "InService\n"
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
    assert mistakes["no picture"].startswith("ModelError: the bytes are not an image of a known format")
    assert deleted == "[]\n"


def test_many_models_are_served_and_one_is_added(execute: Execute) -> None:
    *_, created, asked, added, deleted = execute("many_models.ipynb")

    assert created == "InService\n"
    assert [line.partition(" ")[::2] for line in asked.splitlines()] == [
        (str(factor), str([1.0 * factor, 2.0 * factor, 3.0 * factor])) for factor in range(5)
    ]
    assert added == "ValidationError\n7 [7.0, 14.0, 21.0]\n"
    assert deleted == "[]\n"


def test_tgi_and_lmi_stream_the_same_answer(execute: Execute) -> None:
    *_, created, _, tgi, lmi, deleted = execute("streaming.ipynb")

    assert created == "streaming-tgi InService\nstreaming-lmi InService\n"
    assert tgi == lmi
    pieces, text = tgi.splitlines()
    assert "".join(ast.literal_eval(pieces)) == text == "The circle is red."
    assert len(ast.literal_eval(pieces)) > 1
    assert deleted == "[]\n"


def test_least_outstanding_finds_idle_instances_more_often_than_random(execute: Execute) -> None:
    *_, by_chance, least, deleted = execute("routing.ipynb")

    assert [told.splitlines()[0] for told in (by_chance, least)] == ["2 instances answered"] * 2
    joined = [int(told.splitlines()[1].partition(" ")[0]) for told in (by_chance, least)]
    assert joined[1] < joined[0]
    assert deleted == "[]\n"


def test_an_asynchronous_endpoint_scales_to_zero_and_answers_langchain(execute: Execute, tmp_path: Path) -> None:
    """The kernel is from the environment with LangChain."""
    kernel = tmp_path / "kernels" / "clients"
    kernel.mkdir(parents=True)
    command = [str(require_clients()), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "clients", "language": "python"}))
    *_, asked, idle, woken, by_langchain, deleted = execute(
        "async_inference.ipynb", "--kernel_name=clients", JUPYTER_PATH=str(tmp_path), PYTHONPATH=str(ROOT)
    )

    location, result, failure = asked.splitlines()
    assert location == f"s3://{BUCKET}/async/results"
    assert json.loads(result) == [{"generated_text": "The circle is red."}]
    assert "temperature" in failure
    assert idle == "0 instances\n"
    color, shape, number, *activities = woken.splitlines()
    assert color.endswith("-> The circle is red.")
    assert "circle" in shape.partition("->")[2]
    assert "one" in number.partition("->")[2]
    assert activities == ["Setting desired instance count to 0.", "Setting desired instance count to 1."]
    assert by_langchain == "The circle is red.\nThe circle is\n"
    assert deleted == "[]\n"
