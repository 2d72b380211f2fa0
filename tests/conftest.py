"""Distribute tests among processes, and provide the servers that tests of several folders share.

Each such server starts once per process, when the first test requests it. Slow ones, fleets of real TorchServe
instances, start in one process only: all tests that use a fleet run there, one after the other.
"""

import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import hypothesis
import pytest
from botocore.loaders import create_loader
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests import reaper
from tests.disk import check_machine
from tests.groups import group_of, place_of
from tests.servers import RedisServer, S3Server, run_redis, run_s3
from tests.time_limit import TimeLimit
from tests.tools import require, summarize_skips
from torchmoor.wire.imports import without_collections

ROOT = Path(__file__).parents[1]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts this run in the background ignores SIGINT, and every program that a test starts inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A property test tries the same examples in each run, however slow the machine is.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("suite")
# For .venv-clients and .venv-vllm: unit/torchmoor/clients/test_langchain.py, torchserve/test_langchain_openai.py and
# torchserve/test_vllm.py run them.
collect_ignore = ["clients", "vllm", "torchserve/clients"]


class Groups(LoadScopeScheduling):
    """Assign whole groups to a process."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(ROOT / nodeid.partition("::")[0])


def pytest_configure(config: pytest.Config) -> None:
    reaper.start()
    config.pluginmanager.register(TimeLimit())
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        check_machine()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        require(*mark.args)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Count the skips for missing programs after pytest's own summary."""
    yield
    reports = terminalreporter.getreports("skipped")
    if line := summarize_skips(str(report.longrepr) for report in reports):
        terminalreporter.write_line(line, yellow=True)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (place_of(item.path), item.get_closest_marker("ends_fleet") is not None))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Exempt all modules and tests from garbage collection, because each full collection would visit them."""
    with without_collections():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the records of the run's fleets apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def aws_descriptions() -> Iterator[None]:
    """Read botocore's description of each API once, not for each client."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.session.create_loader", cache(create_loader))
        yield


@pytest.fixture(scope="session")
def bodies() -> list[Any]:
    """Return a list that receives the body of each answer to `boto3.client`."""
    received: list[Any] = []
    boto3.setup_default_session()
    boto3.DEFAULT_SESSION.events.register("after-call", lambda parsed, **_: received.append(parsed.get("Body")))
    return received


@pytest.fixture(autouse=True)
def closed_bodies(bodies: list[Any]) -> Iterator[None]:
    """Close the bodies that a test has not read: their sockets would fail a later test when they are collected."""
    yield
    while bodies:
        if body := bodies.pop():
            body.close()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with run_redis(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A cluster of one node; like a larger one, it refuses a script whose keys hash to different slots."""
    with run_redis(tmp_path_factory.mktemp("cluster"), "--cluster-enabled", "yes") as server:
        server.make_cluster()
        yield server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with run_s3(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield a playwright.sync_api.Browser."""
    from tests.browser import run_chromium  # most tests need no browser: they need not import one

    with run_chromium() as running:
        yield running
