"""CloudWatch for the metrics of invocations: their statistics, their list, and alarms, which run no actions."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from botocore.utils import parse_to_aware_datetime

from torchmoor.control.arns import Arns
from torchmoor.control.listing import ListedResource, list_page
from torchmoor.control.metric_history import MINUTE_S, UTILIZATION, MetricHistory, Observations
from torchmoor.control.metric_math import MetricMath, Series
from torchmoor.control.models import as_time
from torchmoor.control.protocol import Operation, Values
from torchmoor.control.resources import Change, Resource, Resources
from torchmoor.errors import RequestInvalid

NAMESPACE, OF_INSTANCES = "AWS/SageMaker", "/aws/sagemaker/Endpoints"
PAGE_SIZE = 500
MAX_EVALUATED_S = 604_800  # by an alarm, as at AWS
_STATISTIC = re.compile(r"SampleCount|Sum|Average|Minimum|Maximum|p(\d{1,2}(\.\d{1,2})?|100)")
_COMPARISONS = {
    "GreaterThanOrEqualToThreshold": lambda value, threshold: value >= threshold,
    "GreaterThanThreshold": lambda value, threshold: value > threshold,
    "LessThanThreshold": lambda value, threshold: value < threshold,
    "LessThanOrEqualToThreshold": lambda value, threshold: value <= threshold,
}
_TREATMENTS = ("breaching", "notBreaching", "ignore", "missing")


class CloudWatch:
    """Statistics of the metrics of AWS/SageMaker and /aws/sagemaker/Endpoints.

    history: set before the first request is answered.
    """

    history: MetricHistory

    def __init__(self, resources: Resources, arns: Arns) -> None:
        self._resources = resources
        self._arns = arns

    def operations(self) -> dict[str, Operation]:
        """Return the operations by their names."""
        return {
            "GetMetricData": self._get_data,
            "GetMetricStatistics": self._get_statistics,
            "ListMetrics": self._list_metrics,
            "PutMetricAlarm": self._put_alarm,
            "DescribeAlarms": self._describe_alarms,
            "DeleteAlarms": self._delete_alarms,
        }

    def _get_data(self, values: Values) -> Values:
        queries = {query["Id"]: query for query in values["MetricDataQueries"]}
        if len(queries) < len(values["MetricDataQueries"]):
            raise RequestInvalid("Two queries have the same Id.")
        metrics, expressions = {}, {}
        for name, query in queries.items():
            if ("MetricStat" in query) is ("Expression" in query):
                raise RequestInvalid(f"Query {name} must have either MetricStat or Expression.")
            if "MetricStat" in query:
                metrics[name] = self._read_series(query["MetricStat"], values)
            else:
                expressions[name] = query["Expression"]
        start, end = (_seconds(values[key]) for key in ("StartTime", "EndTime"))
        evaluated = MetricMath(expressions, metrics, start, end)
        is_newest_first = values.get("ScanBy") != "TimestampAscending"
        results = []
        for name, query in queries.items():
            found = evaluated.find(name)
            if not query.get("ReturnData", True):
                continue
            if isinstance(found, float):
                raise RequestInvalid(f"Query {name} has a number as its result: it must be a series.")
            default = query["MetricStat"]["Metric"].get("MetricName", "") if "MetricStat" in query else name
            results += [
                _as_result(name, query.get("Label", default), each, is_newest_first=is_newest_first)
                for each in (found if isinstance(found, list) else [found])
            ]
        return {"MetricDataResults": results, "Messages": []}

    def _read_series(self, stat: Mapping[str, Any], window: Mapping[str, Any]) -> Series:
        """Return the points of a query's MetricStat. Raises RequestInvalid."""
        name = _check_statistic(stat["Stat"])
        found = self._read(stat["Metric"], window, stat["Period"])
        return Series({at: float(each.statistic(name)) for at, each in found.items()}, stat["Period"])

    def _get_statistics(self, values: Values) -> Values:
        names = [_check_statistic(name) for name in values.get("Statistics", ())]
        extended = [_check_statistic(name) for name in values.get("ExtendedStatistics", ())]
        if bool(names) is bool(extended):
            raise RequestInvalid("GetMetricStatistics needs either Statistics or ExtendedStatistics.")
        points = [
            {
                "Timestamp": as_time(at),
                "Unit": _unit_of(values["MetricName"], each),
                **{name: float(each.statistic(name)) for name in names},
                **(
                    {"ExtendedStatistics": {name: float(each.statistic(name)) for name in extended}} if extended else {}
                ),
            }
            for at, each in sorted(self._read(values, values, values["Period"]).items())
        ]
        return {"Label": values["MetricName"], "Datapoints": points}

    def _list_metrics(self, values: Values) -> Values:
        wanted = {each["Name"]: each.get("Value") for each in values.get("Dimensions", ())}
        rows = []
        for name, series in self.history.names():
            dimensions = _dimensions_of(series)
            if (
                values.get("Namespace") in (None, _namespace_of(name))
                and values.get("MetricName", name) == name
                and all(key in dimensions and value in (None, dimensions[key]) for key, value in wanted.items())
            ):
                listed = [{"Name": key, "Value": value} for key, value in dimensions.items()]
                summary = {"Namespace": _namespace_of(name), "MetricName": name, "Dimensions": listed}
                rows.append(ListedResource("/".join((name, *series)), 0.0, summary=summary))
        return list_page(rows, {"MaxResults": PAGE_SIZE, "SortBy": "Name", **values}, "Metrics")

    async def _put_alarm(self, values: Values) -> Values:
        if "MetricName" not in values or "Metrics" in values:
            raise RequestInvalid("An alarm has one MetricName here: expressions are not supported.")
        alarms, name = self._resources.alarms, values["AlarmName"]
        if name not in alarms:
            self._resources.check_number(alarms, "alarms")
        _check_alarm(values)
        self._read_alarm(values)
        self._resources.check_room(values)
        alarm = Resource({key: value for key, value in values.items() if key != "Tags"}, time.time())
        await self._resources.change(Change(alarms, name, alarm))
        return {}

    def _describe_alarms(self, values: Values) -> Values:
        names, prefix = values.get("AlarmNames"), values.get("AlarmNamePrefix", "")
        rows = []
        for name, alarm in self._resources.alarms.items():
            state = self._read_alarm(alarm.values)
            if (
                (names is None or name in names)
                and name.startswith(prefix)
                and values.get("StateValue", state) == state
            ):
                summary = {
                    "ActionsEnabled": True,
                    **alarm.values,
                    "AlarmArn": self._arns.alarm_arn(name),
                    "StateValue": state,
                    "StateUpdatedTimestamp": as_time(time.time()),
                    "AlarmConfigurationUpdatedTimestamp": as_time(alarm.created),
                }
                rows.append(ListedResource(name, alarm.created, summary=summary))
        page = list_page(rows, {**values, "MaxResults": values.get("MaxRecords", 50), "SortBy": "Name"}, "MetricAlarms")
        return {"CompositeAlarms": [], **page}

    async def _delete_alarms(self, values: Values) -> Values:
        alarms = self._resources.alarms
        await self._resources.change(*(Change(alarms, name, None) for name in set(values["AlarmNames"])))
        return {}

    def _read_alarm(self, alarm: Mapping[str, Any]) -> str:
        """Return the state by its last periods of an alarm that _check_alarm accepts. Raises RequestInvalid."""
        name = alarm.get("Statistic") or alarm["ExtendedStatistic"]
        compare, now, number = _COMPARISONS[alarm["ComparisonOperator"]], time.time(), alarm["EvaluationPeriods"]
        window = {"StartTime": now - number * alarm["Period"], "EndTime": now + 1}
        found = self._read(alarm, window, alarm["Period"])
        breaching = sum(compare(each.statistic(name), alarm["Threshold"]) for each in found.values())
        if not found:
            return {"breaching": "ALARM", "notBreaching": "OK"}.get(
                alarm.get("TreatMissingData", ""), "INSUFFICIENT_DATA"
            )
        return "ALARM" if breaching >= alarm.get("DatapointsToAlarm", number) else "OK"

    def _read(self, metric: Mapping[str, Any], window: Mapping[str, Any], period: int) -> dict[int, Observations]:
        """Return a metric's values in a time, by period. Raises RequestInvalid."""
        if period % MINUTE_S or period <= 0:
            raise RequestInvalid("Period must be a multiple of 60 seconds here.")
        dimensions = {each["Name"]: each["Value"] for each in metric.get("Dimensions", ())}
        name = str(metric.get("MetricName", ""))
        if metric.get("Namespace") != _namespace_of(name) or dimensions.keys() - {"EndpointName", "VariantName"}:
            return {}
        series = (dimensions.get("EndpointName", ""), dimensions.get("VariantName", ""))
        start, end = (_seconds(window[key]) for key in ("StartTime", "EndTime"))
        if end <= start:
            raise RequestInvalid("EndTime must be after StartTime.")
        return self.history.read(name, series, start=start, end=end, period=period)


def _check_alarm(alarm: Mapping[str, Any]) -> None:
    """Raise RequestInvalid for an alarm that CloudWatch refuses, although botocore's model allows it."""
    if (
        alarm.get("ComparisonOperator") not in _COMPARISONS
        or not {"EvaluationPeriods", "Period", "Threshold"} <= alarm.keys()
    ):
        raise RequestInvalid(
            "An alarm needs EvaluationPeriods, Period, Threshold, and a ComparisonOperator without anomaly detection."
        )
    if ("Statistic" in alarm) is ("ExtendedStatistic" in alarm):
        raise RequestInvalid("An alarm needs either Statistic or ExtendedStatistic.")
    _check_statistic(alarm.get("Statistic") or alarm["ExtendedStatistic"])
    number = alarm["EvaluationPeriods"]
    if number * alarm["Period"] > MAX_EVALUATED_S:
        raise RequestInvalid(f"EvaluationPeriods times Period must be at most {MAX_EVALUATED_S} seconds.")
    if alarm.get("DatapointsToAlarm", number) > number:
        raise RequestInvalid("DatapointsToAlarm must be at most EvaluationPeriods.")
    if alarm.get("TreatMissingData", "missing") not in _TREATMENTS:
        raise RequestInvalid(f"TreatMissingData must be one of {', '.join(_TREATMENTS)}.")


def _namespace_of(name: str) -> str:
    """Return the namespace of a metric."""
    return OF_INSTANCES if name in UTILIZATION else NAMESPACE


def _unit_of(name: str, found: Observations) -> str:
    return "Microseconds" if found.buckets else "Percent" if name in UTILIZATION else "Count"


def _as_result(name: str, label: str, series: Series, *, is_newest_first: bool) -> dict[str, Any]:
    points = sorted(series.points.items(), reverse=is_newest_first)
    return {
        "Id": name,
        "Label": label,
        "Timestamps": [as_time(at) for at, _ in points],
        "Values": [value for _, value in points],
        "StatusCode": "Complete",
    }


def _dimensions_of(series: tuple[str, str]) -> dict[str, str]:
    endpoint, variant = series
    return {"EndpointName": endpoint, **({"VariantName": variant} if variant else {})}


def _check_statistic(name: str) -> str:
    if not _STATISTIC.fullmatch(name):
        raise RequestInvalid(f"Statistic {name!r} must be SampleCount, Sum, Average, Minimum, Maximum or pNN.")
    return name


def _seconds(value: object) -> float:
    time_: datetime = parse_to_aware_datetime(value)
    return time_.timestamp()
