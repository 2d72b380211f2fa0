"""An instance of real TorchServe whose port another program takes while it starts."""

import sys
from pathlib import Path

import pytest

from tests.torchserve.conftest import run_fleet

pytestmark = [pytest.mark.torchserve, pytest.mark.slow]

PROGRAM = """#!{python}
import socket
import sys
from torchmoor.cli.main import main
from torchmoor.fleet import instance_process

find_free_ports, taken, places = instance_process.find_free_ports, [], [0, 3]


def find_and_take(number, **among):
    ports = find_free_ports(number, **among)
    if places and number > places[0]:
        taken.append(socket.create_server(("127.0.0.1", ports[places.pop(0)])))
    return ports


instance_process.find_free_ports = find_and_take
sys.exit(main())
"""


def test_the_instance_starts_with_other_ports(archives: Path, tmp_path: Path) -> None:
    """Another program takes TorchServe's HTTP port while it loads the model, and a gRPC port at the next start."""
    program = tmp_path / "up.py"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    log = tmp_path / "up.log"

    with run_fleet(run_dir=tmp_path / "run", log=log, program=program) as fleet:
        assert fleet.client().invoke_endpoint(EndpointName="llava", Body=b'{"inputs": "hello"}')["Body"].read()

    assert log.read_text().count("llava-0 found one of its ports taken") == 2
