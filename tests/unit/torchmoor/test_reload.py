"""Changes that a reload refuses, and SIGHUP while the proxy starts or stops."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from torchmoor.config.file import parse
from torchmoor.config.settings import Configuration
from torchmoor.fleet.discovery import Discovery
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run import serve
from torchmoor.run.reload import Reloader
from torchmoor.run.static_instances import make_registry


def make_configuration(most: int, **more: Any) -> Configuration:
    variants = [{"VariantName": "v", "ModelName": "llava", "InitialInstanceCount": 0}]
    config = {"EndpointConfigName": "llava", "ProductionVariants": variants}
    content: dict[str, Any] = {
        "Endpoints": [{"EndpointName": "llava", "EndpointConfig": config}],
        "Autoscaling": [{"ResourceId": "endpoint/llava/variant/v", "MinCapacity": 0, "MaxCapacity": most}],
        **more,
    }
    return parse(content)


def test_a_change_of_autoscaling_is_refused_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    """The error names autoscaling, although its settings become part of the endpoints'."""
    proxy = Mock()
    reloader = Reloader(make_configuration(1), lambda: make_configuration(2), Mock(), proxy, Mock(), Mock())

    reloader.reload()

    assert "a change of Endpoints or Autoscaling needs a restart" in caplog.text
    assert proxy.mock_calls == []


def test_a_change_of_the_launcher_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """The launcher keeps the settings of its start, so a reload must not seem to apply others."""
    proxy, drainer, discovery = Mock(), Mock(), Mock()
    changed = make_configuration(1, launcher={"capacity": 5})
    reloader = Reloader(make_configuration(1), lambda: changed, Mock(), proxy, drainer, discovery)

    reloader.reload()

    assert "a change of launcher needs a restart" in caplog.text
    assert [each.mock_calls for each in (proxy, drainer, discovery)] == [[], [], []]


def write_file(path: Path, *names: str) -> None:
    variants = [{"VariantName": "v", "ModelName": "llava", "InitialInstanceCount": 1}]
    config = {"EndpointConfigName": "llava", "ProductionVariants": variants}
    content = {
        "Endpoints": [{"EndpointName": "llava", "EndpointConfig": config}],
        "Instances": [{"name": name, "variant": "v", "port": 1} for name in names],
        "listen": {"port": 0, "admin_port": 0},
    }
    path.write_text(json.dumps(content))


async def serve_until_ready(path: Path) -> None:
    def stop(line: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    await serve.run(path, given={}, is_open=False, report=print, announce=stop)


async def test_a_hangup_during_the_start_reloads_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file may have changed after it was read, so the start ends with a reload."""
    path = tmp_path / "torchmoor.yaml"
    write_file(path, "a")

    def make_changed(configuration: Configuration) -> Registry:
        write_file(path, "a", "b")
        os.kill(os.getpid(), signal.SIGHUP)
        return make_registry(configuration)

    monkeypatch.setattr(serve, "make_registry", make_changed)

    await serve_until_ready(path)

    assert "configuration read again instances=2" in caplog.text


async def test_a_hangup_during_the_stop_reloads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Parts that have stopped, such as discovery, must not begin again."""
    path = tmp_path / "torchmoor.yaml"
    write_file(path, "a")

    class Leaving(Discovery):
        async def __aexit__(self, *error: object) -> None:
            await super().__aexit__(*error)
            os.kill(os.getpid(), signal.SIGHUP)
            for _ in range(10):
                await asyncio.sleep(0)

    monkeypatch.setattr(serve, "Discovery", Leaving)

    await serve_until_ready(path)

    assert "configuration read again" not in caplog.text
