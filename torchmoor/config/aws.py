"""Checks of AWS's own structures against botocore's service models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import botocore.session
from botocore.model import ServiceModel, Shape
from botocore.validate import ParamValidator

from torchmoor.errors import ConfigError


def check_input(values: Mapping[str, Any], shape: Shape, where: str) -> None:
    """Raise ConfigError unless the names and types are those of an operation's input."""
    report = ParamValidator().validate(values, shape)
    if report.has_errors():
        raise ConfigError(f"{where}: {'; '.join(report.generate_report().splitlines())}")


def input_shape(service: str, operation: str) -> Shape:
    """Return an operation's input as the installed botocore describes it."""
    return _service_model(service).operation_model(operation).input_shape


@cache
def _service_model(service: str) -> ServiceModel:
    return botocore.session.Session().get_service_model(service)
