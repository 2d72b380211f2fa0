"""How tests are shared out among processes, and servers that tests of several folders share.

Each such server is started once a process, when the first test asks for it. What takes long to start, a fleet of real
TorchServe instances, is started in one process only: all tests that use it run there, one after the other.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

from tests.servers import RedisServer, S3Server, run_redis, run_s3

collect_ignore = ["clients"]  # for .venv-clients; tests/unit/torchmoor/clients/test_langchain.py runs them

TESTS = Path(__file__).parent
FLEETS = ("fleet", "many")  # fixtures of more than one file
SHORT = ("proxy", "fuzz", "unit")  # folders of many short tests, which fill what the long ones leave


class FilesTogether(LoadGroupScheduling):
    """A process gets a whole file at a time, or all the tests that use one of FLEETS."""

    def _split_scope(self, nodeid: str) -> str:
        return str(super()._split_scope(nodeid)).partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesTogether:
    return FilesTogether(config, log)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process is left with it at the end while the others have nothing."""
    for item in items:
        for name in shared_fleet(item):
            item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=place_of)


def shared_fleet(item: pytest.Item) -> list[str]:
    """The fleet that a test shares with other files, if it does."""
    return [name for name in FLEETS if name in getattr(item, "fixturenames", ())][:1]


def place_of(item: pytest.Item) -> tuple[int, int]:
    """Fleets, then what starts processes of its own, then the short ones."""
    fleet, folder = shared_fleet(item), item.path.relative_to(TESTS).parts[0]
    return (FLEETS.index(fleet[0]) if fleet else len(FLEETS), SHORT.index(folder) if folder in SHORT else -1)


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
