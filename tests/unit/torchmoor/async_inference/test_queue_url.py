"""Valid forms of a queue's URL, and errors for wrong ones."""

from pathlib import Path

import pytest

from torchmoor.async_inference.queues.queue_url import open_queue
from torchmoor.async_inference.queues.redis_queue import RedisQueue
from torchmoor.async_inference.queues.sqlite_queue import SqliteQueue
from torchmoor.config.async_queue import AsyncQueueSettings
from torchmoor.errors import ConfigError


async def test_the_scheme_chooses_the_queue(tmp_path: Path) -> None:
    """A file URL opens SQLite and creates its folder; a server's URL makes no connection yet."""
    path = tmp_path / "a b" / "queue.db"

    for slashes in ("//", "///"):
        queue = open_queue(f"sqlite:{slashes}{str(path).replace(' ', '%20')}", AsyncQueueSettings())
        assert isinstance(queue, SqliteQueue)
        await queue.close()
    for scheme in ("redis", "rediss", "valkey", "valkeys"):
        queue = open_queue(f"{scheme}://user:p%40ss@nowhere.invalid:1/2", AsyncQueueSettings())
        assert isinstance(queue, RedisQueue)
        await queue.close()

    assert path.exists()


@pytest.mark.parametrize(
    "url",
    [
        *("", "queue.db", "file:///tmp/hunter2", "sqlite://host/hunter2", "sqlite:///", "sqlite:///hunter2/"),
        *("redis://:hunter2@/0", "redis://:hunter2@host/x", "redis://:hunter2@host:port/0", "http://hunter2"),
        *("redis://:hunter2@host/0?x=1", "redis://:hunter#2@host/0"),
    ],
)
def test_a_wrong_url_is_refused_without_its_secret(url: str) -> None:
    """The error for a wrong URL lists the valid forms and omits the secret."""
    with pytest.raises(ConfigError, match=r"must (be|name|have|not have)") as refused:
        open_queue(url, AsyncQueueSettings())

    assert "hunter" not in str(refused.value)


def test_settings_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"async_queue.max_pending"):
        AsyncQueueSettings(max_pending=0)
