"""Waits for an endpoint, prints its progress, and explains its failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from scripts.sagemaker_deploy.account import Account, AwsError
from scripts.sagemaker_deploy.errors import DeployError, EndpointFailed

MOVING = {"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"}
REPEAT_S = 60.0  # interval at which an unchanged line is printed again, to show progress
NUM_LOG_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How to wait and report. Tests replace the clock."""

    say: Callable[[str], None]
    poll_s: float = 10.0
    timeout_s: float = 3600.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def find_endpoint(account: Account, name: str) -> Any | None:
    """Return DescribeEndpoint's answer; None if there is no such endpoint. Raises DeployError."""
    return account.find("sagemaker", "describe_endpoint", EndpointName=name)


def wait_settled(account: Account, name: str, watch: Watch) -> Any | None:
    """Wait until the endpoint is not being created, updated or deleted.

    Return it, or None if it does not exist. Raises DeployError.
    """
    start = printed_at = watch.clock()
    printed = ""
    while True:
        endpoint = find_endpoint(account, name)
        now = watch.clock()
        state = "gone" if endpoint is None else describe(endpoint)
        if state != printed or now - printed_at >= REPEAT_S:
            watch.say(f"[{now - start:5.0f} s] {name}: {state}")
            printed, printed_at = state, now
        if endpoint is None or endpoint["EndpointStatus"] not in MOVING:
            return endpoint
        if now - start >= watch.timeout_s:
            raise DeployError(
                f"{name} is still {endpoint['EndpointStatus']} after {now - start:.0f} s; SageMaker continues. "
                f"`deploy_sagemaker.py status --endpoint {name}` shows its progress; run the same command again for "
                "the steps after it, such as autoscaling"
            )
        watch.sleep(watch.poll_s)


def describe(endpoint: Any) -> str:
    """Return the state of an endpoint and of its variants in one line."""
    text = str(endpoint["EndpointStatus"])
    for variant in endpoint.get("ProductionVariants", ()):
        for status in variant.get("VariantStatus", ()):
            message = f" ({status['StatusMessage']})" if status.get("StatusMessage") else ""
            text += f", {variant['VariantName']} {status['Status']}{message}"
    return text


def log_group(endpoint: str) -> str:
    """Return the log group of an endpoint's containers in CloudWatch Logs."""
    return f"/aws/sagemaker/Endpoints/{endpoint}"


def failure(account: Account, endpoint: str, reason: str) -> EndpointFailed:
    """Return an error with SageMaker's reason and, if the caller may read them, the container's last lines."""
    group = log_group(endpoint)
    try:
        lines = _last_lines(account, group)
    except AwsError as error:
        lines = [f"(cannot be read: {error.message})"]
    shown = "".join(f"\n  | {line}" for line in lines) or "\n  (the container has printed nothing)"
    return EndpointFailed(f"{reason}\nIts log is CloudWatch Logs {group} in {account.region}:{shown}")


def _last_lines(account: Account, group: str) -> list[str]:
    streams = account.find(
        "logs", "describe_log_streams", logGroupName=group, orderBy="LastEventTime", descending=True, limit=1
    )
    if streams is None or not streams["logStreams"]:
        return []
    name = streams["logStreams"][0]["logStreamName"]
    found = account.ask(
        "logs", "get_log_events", logGroupName=group, logStreamName=name, limit=NUM_LOG_LINES, startFromHead=False
    )
    return [
        f"{datetime.fromtimestamp(event['timestamp'] / 1000, UTC):%H:%M:%S} {event['message'].rstrip()}"
        for event in found["events"]
    ]
