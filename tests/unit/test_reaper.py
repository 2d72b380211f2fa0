"""What a test process has started is found when the process ends."""

import os

import pytest

from tests import reaper
from tests.servers import RedisServer


@pytest.mark.redis
def test_servers_are_found_by_their_variable(redis_server: RedisServer) -> None:
    """A server that renames its process would outlive a test run that is interrupted."""

    assert redis_server.process.pid in reaper.descendants(os.environ[reaper.VARIABLE])
