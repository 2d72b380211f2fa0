"""Alarms that cannot be evaluated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from torchmoor.config.control import ControlSettings
from torchmoor.control.arns import Arns
from torchmoor.control.cloudwatch import CloudWatch
from torchmoor.control.resources import Resources
from torchmoor.errors import RequestInvalid

ALARM = {
    "AlarmName": "many",
    "Namespace": "AWS/SageMaker",
    "MetricName": "Invocations",
    "Statistic": "Sum",
    "ComparisonOperator": "GreaterThanThreshold",
    "Threshold": 1.0,
    "EvaluationPeriods": 1,
    "Period": 60,
}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ComparisonOperator", None, "An alarm needs EvaluationPeriods, Period"),
        ("EvaluationPeriods", None, "An alarm needs EvaluationPeriods, Period"),
        ("Period", None, "An alarm needs EvaluationPeriods, Period"),
        ("EvaluationPeriods", 2**31 - 1, "EvaluationPeriods times Period must be at most 604800 seconds"),
    ],
)
def test_an_alarm_that_cannot_be_evaluated_is_refused(tmp_path: Path, name: str, value: Any, reason: str) -> None:
    """An alarm without the values that CloudWatch needs is refused; botocore's model requires none of them."""
    resources = Resources(tmp_path, 1 << 20)
    operations: Any = CloudWatch(ControlSettings(), resources, Arns("us-east-1", "123456789012")).operations()
    alarm = {key: each for key, each in {**ALARM, name: value}.items() if each is not None}

    with pytest.raises(RequestInvalid, match=reason):
        asyncio.run(operations["PutMetricAlarm"](alarm))

    assert resources.alarms == {}
