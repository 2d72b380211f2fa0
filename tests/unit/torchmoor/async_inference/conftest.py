"""Every kind of queue, empty."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis.asyncio

from tests.servers import RedisServer
from tests.unit.torchmoor.async_inference.stores import Clock, Store
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.queues.redis_queue import PREFIX, RedisQueue
from torchmoor.async_inference.queues.sqlite_queue import SqliteQueue
from torchmoor.config.async_queue import AsyncQueueSettings

SERVERS = {"valkey": "redis_server", "cluster": "redis_cluster"}


@pytest.fixture(
    params=(
        "sqlite",
        pytest.param("valkey", marks=pytest.mark.redis),
        pytest.param("cluster", marks=pytest.mark.redis),
    )
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Yield an empty store."""
    if request.param == "sqlite":
        path = tmp_path / "queue" / "requests.db"
        with Store(f"sqlite://{path}", partial(SqliteQueue, path)) as store:
            yield store
    else:
        server: RedisServer = request.getfixturevalue(SERVERS[request.param])
        with server.client() as client:
            for key in client.scan_iter(f"{PREFIX}*"):
                client.delete(key)
        with Store(server.url, partial(make_redis, server)) as store:
            yield store


def make_redis(server: RedisServer, settings: AsyncQueueSettings, clock: Clock) -> Queue:
    """Open a queue under the test's clock."""
    client = redis.asyncio.Redis(
        port=urlsplit(server.url).port or 0, username=server.user, password=server.password, protocol=2
    )
    return RedisQueue(client, settings, clock)


@pytest.fixture
def queue(store: Store) -> Queue:
    """Open the store's queue, as one process does."""
    return store.opened()
