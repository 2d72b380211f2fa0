"""The proxy's settings in the container."""

from pathlib import Path

from torchmoor.container.environment import read_environment
from torchmoor.container.model import FoundModel
from torchmoor.container.serve import make_settings
from torchmoor.fleet.ports import find_free_ports

LONGEST = 512 << 20


def test_a_large_max_request_size_needs_no_other_setting(tmp_path: Path) -> None:
    """The limit of all arriving bodies, which has no variable of its own, allows for the longest body."""
    variables = read_environment({"TS_MAX_REQUEST_SIZE": str(LONGEST)})
    found = FoundModel(name="llava", archive="llava.mar", store=tmp_path)

    limits = make_settings(variables, found, "").limits

    assert (limits.max_passthrough_body_bytes, limits.max_arriving_bytes) == (LONGEST, LONGEST)


def test_admin_plane_leaves_the_proxys_port_alone(tmp_path: Path) -> None:
    """The admin plane avoids the proxy's port, even if it is free and within the safe ports."""
    [own, other] = find_free_ports(2, among=range(23_400, 23_500))
    ports = f"{min(own, other)}-{max(own, other)}"
    variables = read_environment({"SAGEMAKER_BIND_TO_PORT": str(own), "SAGEMAKER_SAFE_PORT_RANGE": ports})
    found = FoundModel(name="llava", archive="llava.mar", store=tmp_path)

    chosen = {make_settings(variables, found, "").listen.admin_port for _ in range(30)}

    assert own not in chosen
