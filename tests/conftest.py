"""Servers that tests of several folders share; each is started once, when the first test asks for it."""

from collections.abc import Iterator

import pytest

from tests.servers import RedisServer, S3Server, run_redis, run_s3

collect_ignore = ["clients"]  # for .venv-clients; tests/unit/torchmoor/clients/test_langchain.py runs them


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with run_redis(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A cluster of one node: it refuses what a larger one would, a script whose keys lie apart."""
    with run_redis(tmp_path_factory.mktemp("cluster"), "--cluster-enabled", "yes") as server:
        server.make_cluster()
        yield server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with run_s3(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server
