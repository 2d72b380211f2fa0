"""Alarms that cannot be evaluated or saved."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchmoor.config.control import ControlSettings
from torchmoor.control.arns import Arns
from torchmoor.control.cloudwatch import CloudWatch
from torchmoor.control.resources import FILE, Resources
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
        ("Statistic", None, "An alarm needs either Statistic or ExtendedStatistic"),
        ("ExtendedStatistic", "p99", "An alarm needs either Statistic or ExtendedStatistic"),
        ("DatapointsToAlarm", 2, "DatapointsToAlarm must be at most EvaluationPeriods"),
        ("TreatMissingData", "bad", "TreatMissingData must be one of breaching, notBreaching, ignore, missing"),
    ],
)
def test_an_alarm_that_cannot_be_evaluated_is_refused(tmp_path: Path, name: str, value: Any, reason: str) -> None:
    """An alarm without the values that CloudWatch needs is refused; botocore's model requires none of them."""
    resources = Resources(tmp_path, ControlSettings())
    operations: Any = CloudWatch(resources, Arns("us-east-1", "123456789012")).operations()
    alarm = {key: each for key, each in {**ALARM, name: value}.items() if each is not None}

    with pytest.raises(RequestInvalid, match=reason):
        asyncio.run(operations["PutMetricAlarm"](alarm))

    assert resources.alarms == {}


@pytest.mark.parametrize("chosen", [{}, {"Statistics": ["Sum"], "ExtendedStatistics": ["p99"]}])
def test_statistics_are_of_one_kind(tmp_path: Path, chosen: dict[str, list[str]]) -> None:
    """Without a statistic, the points of the answer would have no values."""
    resources = Resources(tmp_path, ControlSettings())
    operations: Any = CloudWatch(resources, Arns("us-east-1", "123456789012")).operations()

    with pytest.raises(RequestInvalid, match="needs either Statistics or ExtendedStatistics"):
        operations["GetMetricStatistics"]({"MetricName": "Invocations", **chosen})


def test_alarms_that_cannot_be_saved_are_as_before(tmp_path: Path) -> None:
    """The answer says so; a restart would have the old ones."""
    resources = Resources(tmp_path, ControlSettings())
    control = CloudWatch(resources, Arns("us-east-1", "123456789012"))
    no_history: Any = SimpleNamespace(read=lambda *_, **__: {})
    control.history = no_history
    operations: Any = control.operations()
    asyncio.run(operations["PutMetricAlarm"](ALARM))
    (tmp_path / FILE).with_suffix(".partial").mkdir()

    for operation, values in (
        ("PutMetricAlarm", {**ALARM, "AlarmName": "new"}),
        ("PutMetricAlarm", {**ALARM, "Threshold": 2.0}),
        ("DeleteAlarms", {"AlarmNames": ["many", "unknown"]}),
    ):
        with pytest.raises(IsADirectoryError):
            asyncio.run(operations[operation](values))

    assert {name: alarm.values for name, alarm in resources.alarms.items()} == {"many": ALARM}
