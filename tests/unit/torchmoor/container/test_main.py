"""The image's entry point."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.archives import write_small_archive
from tests.servers import free_ports
from tests.waiting import DEADLINE_S
from torchmoor.container.__main__ import main
from torchmoor.fleet.archives import chat_handler, write_archive


class Executed(BaseException):
    """Raised where another program would replace the process."""


@pytest.mark.parametrize(("own", "found"), [(None, "eu-west-1"), ("eu-central-1", "eu-central-1")])
def test_region_of_the_platform_is_boto3s(monkeypatch: pytest.MonkeyPatch, own: str | None, found: str) -> None:
    """AWS_REGION, which SageMaker and Kubernetes set, becomes boto3's region unless boto3's own variable is set."""

    def execv(program: Path, words: Sequence[str]) -> None:
        assert words[1:] == ["serve", "--config", "torchmoor.yaml"]
        raise Executed

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv("AWS_DEFAULT_REGION", own or "")
    if own is None:
        monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")

    with pytest.raises(Executed):
        main(["proxy", "--config", "torchmoor.yaml"])

    assert os.environ["AWS_DEFAULT_REGION"] == found


def run_role(role: str, **variables: str) -> tuple[int, str]:
    """Run a role to its end. Return its exit status and its last line."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}
    ended = subprocess.run(
        [sys.executable, "-m", "torchmoor.container", role],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return ended.returncode, (ended.stdout + ended.stderr).splitlines()[-1]


@pytest.mark.parametrize("variable", ["SAGEMAKER_BIND_TO_PORT", "TORCHMOOR_ADMIN_PORT"])
def test_a_port_in_use_is_an_error_that_names_the_variables(tmp_path: Path, variable: str) -> None:
    """The container has no options."""
    write_small_archive(tmp_path / "llava.mar", modelName="llava")
    ports = dict(zip(("SAGEMAKER_BIND_TO_PORT", "TORCHMOOR_ADMIN_PORT"), map(str, free_ports(2)), strict=True))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, last = run_role("serve", **{**ports, variable: str(port), "TORCHMOOR_MODEL_DIR": str(tmp_path)})

    assert status == 1
    assert f":{port}: the port is in use; set SAGEMAKER_BIND_TO_PORT or TORCHMOOR_ADMIN_PORT to another port" in last


@pytest.mark.parametrize("role", ["serve", "instance"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("TORCHMOOR_HANDLER_SESSION_TTL", "5"), ("HF_MODEL_ID", "owner/name/more"), ("TORCHMOOR_HEAP_MIB", "127")],
)
def test_a_wrong_variable_is_named_before_anything_starts(tmp_path: Path, role: str, name: str, value: str) -> None:
    write_archive(chat_handler(), "chat", tmp_path / "chat.mar")
    folders = {"TORCHMOOR_ARCHIVES": str(tmp_path), "TORCHMOOR_MODEL_DIR": str(tmp_path / "none")}
    status, last = run_role(role, **{**folders, "HF_MODEL_ID": "owner/name", name: value})

    assert (status, last.startswith(f"torchmoor: error: {name} ")) == (2, True), last
