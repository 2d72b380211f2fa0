"""Changes that a reload refuses."""

from typing import Any
from unittest.mock import Mock

import pytest

from torchmoor.config.file import parse
from torchmoor.config.settings import Configuration
from torchmoor.run.reload import Reloader


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
