"""Checks requests against botocore's service model before any is sent.

botocore's validator checks types, required members and lower limits. Upper limits, patterns and enumerations are also
in the model, but only AWS checks them, when half of the deployment is done. So this module checks them, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from botocore import xform_name
from botocore.model import Shape
from botocore.validate import ParamValidator

from scripts.register_autoscaling import Call
from scripts.sagemaker_deploy.errors import SettingsError
from torchmoor.config.aws import service_model


def check(call: Call) -> None:
    """Raise SettingsError with all faults of a request's parameters, if there are any."""
    model = service_model(call.service)
    names = {xform_name(name): name for name in model.operation_names}
    shape = model.operation_model(names[call.operation]).input_shape
    report = ParamValidator().validate(call.parameters, shape)
    faults = report.generate_report().splitlines() if report.has_errors() else list(_faults(call.parameters, shape, ""))
    if faults:
        raise SettingsError(f"{names[call.operation]}: {'; '.join(faults)}")


def _faults(value: Any, shape: Shape, where: str) -> Iterator[str]:
    if shape.type_name == "structure":
        for name, item in value.items():
            yield from _faults(item, shape.members[name], f"{where}.{name}".lstrip("."))
    elif shape.type_name == "list":
        yield from _limits(len(value), "entries", shape, where)
        for number, item in enumerate(value):
            yield from _faults(item, shape.member, f"{where}[{number}]")
    elif shape.type_name == "map":
        for key, item in value.items():
            yield from _faults(key, shape.key, f"{where}.{key}")
            yield from _faults(item, shape.value, f"{where}.{key}")
    elif shape.type_name == "string":
        yield from _limits(len(value), "characters", shape, where)
        choices, pattern = shape.metadata.get("enum"), shape.metadata.get("pattern")
        if choices and value not in choices:
            known = ", ".join(choices) if len(choices) <= 12 else "those that this boto3 knows"
            yield f"{where} must be one of {known}, not {value!r}"
        elif pattern and not _matches(pattern, value):
            yield f"{where} must look like {pattern}, not {value!r}"
    elif shape.type_name in ("integer", "long", "float", "double"):
        yield from _limits(value, "", shape, where)


def _limits(number: float, unit: str, shape: Shape, where: str) -> Iterator[str]:
    most = shape.metadata.get("max")
    if most is not None and number > most:
        yield f"{where} must be at most {most} {unit}".rstrip() + f", not {number}"


def _matches(pattern: str, value: str) -> bool:
    """Return whether a value matches a pattern of AWS; True if Python cannot compile the pattern, which is Java's."""
    try:
        return re.fullmatch(pattern, value, re.DOTALL) is not None
    except re.error:
        return True
