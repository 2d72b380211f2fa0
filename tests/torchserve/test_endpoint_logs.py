"""The logs of instances with boto3's CloudWatch Logs client."""

from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.torchserve.conftest import Fleet

pytestmark = pytest.mark.torchserve


def test_the_logs_of_instances_are_read_like_cloudwatchs(fleet: Fleet, aws: Callable[[str, Fleet], Any]) -> None:
    """Logs are available without --control-plane, for endpoints that the command line names."""
    logs, group = aws("logs", fleet), "/aws/sagemaker/Endpoints/llava"
    streams = logs.describe_log_streams(logGroupName=group)["logStreams"]
    assert [each["logStreamName"] for each in streams] == ["AllTraffic/llava-0", "AllTraffic/llava-1"]
    assert streams[0]["firstEventTimestamp"] <= streams[0]["lastEventTimestamp"]
    stream = {"logGroupName": group, "logStreamName": "AllTraffic/llava-0"}
    every = logs.get_log_events(**stream, startFromHead=True)
    first = logs.get_log_events(**stream, startFromHead=True, limit=1)
    second = logs.get_log_events(**stream, nextToken=first["nextForwardToken"], limit=1)
    assert first["events"] + second["events"] == every["events"][:2]
    before = logs.get_log_events(**stream, nextToken=second["nextBackwardToken"], limit=1)
    assert before["events"] == first["events"]
    found = logs.filter_log_events(logGroupName=group, filterPattern='MODEL_LOG -"no such words"', limit=3)
    assert all("MODEL_LOG" in each["message"] for each in found["events"])
    assert len(found["events"]) == 3
    rest = logs.filter_log_events(logGroupName=group, filterPattern="MODEL_LOG", nextToken=found["nextToken"])
    assert rest["events"][0] not in found["events"]
    for missing in ({"logGroupName": group + "-2", "logStreamName": "a"}, {**stream, "logStreamName": "../llava-0"}):
        with pytest.raises(ClientError, match="does not exist") as caught:
            logs.get_log_events(**missing)
        assert caught.value.response["Error"]["Code"] == "ResourceNotFoundException"
