"""An instance of real TorchServe whose port another program takes while it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.torchserve.conftest import run_fleet

pytestmark = [pytest.mark.torchserve, pytest.mark.slow]

PROGRAM = """#!{python}
import socket
import sys
from torchmoor.cli.main import main
from torchmoor.fleet import launcher

find_free_ports, taken = launcher.find_free_ports, []


def find_and_take(number, **among):
    ports = find_free_ports(number, **among)
    if number > {place} and not taken:
        taken.append(socket.create_server(("127.0.0.1", ports[{place}])))
    return ports


launcher.find_free_ports = find_and_take
sys.exit(main())
"""


@pytest.mark.parametrize("place", [0, 3], ids=["HTTP", "gRPC"])
def test_the_instance_starts_with_other_ports(archives: Path, tmp_path: Path, place: int) -> None:
    """TorchServe finds the port taken after it has begun to load the model."""
    program = tmp_path / "up.py"
    program.write_text(PROGRAM.format(python=sys.executable, place=place))
    program.chmod(0o755)
    log = tmp_path / "up.log"

    with run_fleet(run_dir=tmp_path / "run", log=log, program=program) as fleet:
        assert fleet.client().invoke_endpoint(EndpointName="llava", Body=b'{"inputs": "hello"}')["Body"].read()

    assert log.read_text().count("llava-0 found one of its ports taken") == 1
