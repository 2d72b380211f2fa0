"""Checks of AWS's own structures against botocore's service models."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import botocore.session
from botocore.model import ServiceModel, Shape
from botocore.validate import ParamValidator

from torchmoor.errors import ConfigError

_MODEL_URLS = ("Url", "S3ModelUri")  # shapes that may also name files of this host

_LARGEST = {"integer": 2**31 - 1, "long": 2**63 - 1, "float": sys.float_info.max, "double": sys.float_info.max}


def check_input(values: Mapping[str, Any], shape: Shape, where: str) -> None:
    """Raise ConfigError unless the names and types are those of an operation's input."""
    try:
        report = ParamValidator().validate(values, shape)
    except RecursionError:
        raise
    except (RuntimeError, OverflowError, OSError) as error:  # of botocore's parse_timestamp
        raise ConfigError(f"{where}: a time is out of range: {error}") from error
    if report.has_errors():
        raise ConfigError(f"{where}: {'; '.join(report.generate_report().splitlines())}")


def check_constraints(value: Any, shape: Shape, where: str) -> None:
    """Raise ConfigError about ranges, lengths, patterns and choices, which the service checks and botocore does not."""
    largest = _LARGEST.get(shape.type_name)
    if largest is not None and not abs(value) <= largest:  # not a number is neither less nor more
        raise ConfigError(f"{where} must be a number of the type {shape.type_name}, not {value!r}")
    for item, of_item, at in _parts(value, shape, where):
        check_constraints(item, of_item, at)
    most = shape.metadata.get("max")
    if most is not None:
        _check_most(value, most, where)
    pattern = shape.metadata.get("pattern")
    if shape.name in _MODEL_URLS and str(value).startswith("file://"):
        return
    if pattern is not None and isinstance(value, str) and not _compile(pattern).fullmatch(value):
        raise ConfigError(f"{where} must match {pattern}, not {value!r}")
    choices = getattr(shape, "enum", None)  # of strategies the proxy has a table of its own
    if shape.name != "RoutingStrategy" and choices and value not in choices:
        raise ConfigError(f"{where} must be one of {', '.join(choices)}, not {value!r}")


def _parts(value: Any, shape: Shape, where: str) -> Iterator[tuple[Any, Shape, str]]:
    """Yield the parts of a structure, list or map, each with its shape and its place."""
    if shape.type_name == "structure":
        for key, item in value.items():
            yield item, shape.members[key], f"{where}.{key}"
    elif shape.type_name == "list":
        for number, item in enumerate(value):
            yield item, shape.member, f"{where}[{number}]"
    elif shape.type_name == "map":
        for key, item in value.items():
            yield key, shape.key, where
            yield item, shape.value, f"{where}.{key}"


def _check_most(value: Any, most: float, where: str) -> None:
    """Raise ConfigError if a number, or the length of a text, list or map, is larger."""
    if isinstance(value, (int, float)) and value > most:
        raise ConfigError(f"{where} must be {most} at most, not {value!r}")
    if isinstance(value, (str, list, dict)) and len(value) > most:
        unit = "characters" if isinstance(value, str) else "entries"
        raise ConfigError(f"{where} must have {most} {unit} at most, not {len(value)}")


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    """Return a pattern of a service model; one with Java's Unicode classes, which only tags have, matches all."""
    try:
        return re.compile(pattern)
    except re.error:
        return re.compile(r"[\s\S]*")


def input_shape(service: str, operation: str) -> Shape:
    """Return an operation's input as the installed botocore describes it."""
    return service_model(service).operation_model(operation).input_shape


@cache
def service_model(service: str) -> ServiceModel:
    """Return a service as the installed botocore describes it."""
    return botocore.session.Session().get_service_model(service)
