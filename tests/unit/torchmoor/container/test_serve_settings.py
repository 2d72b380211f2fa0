"""The proxy's settings in the container."""

from pathlib import Path

from torchmoor.container.environment import read_environment
from torchmoor.container.model import FoundModel
from torchmoor.container.serve import make_settings

LONGEST = 512 << 20


def test_a_large_max_request_size_needs_no_other_setting(tmp_path: Path) -> None:
    """The limit of all arriving bodies, which has no variable of its own, allows for the longest body."""
    variables = read_environment({"TS_MAX_REQUEST_SIZE": str(LONGEST)})
    found = FoundModel(name="llava", archive="llava.mar", store=tmp_path)

    limits = make_settings(variables, found, "").limits

    assert (limits.max_passthrough_body_bytes, limits.max_arriving_bytes) == (LONGEST, LONGEST)
