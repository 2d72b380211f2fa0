"""Deploy an endpoint on SageMaker, look at it, and take it away with all that was made for it.

python scripts/deploy_sagemaker.py deploy --config endpoint.yaml             create it, or move it to these settings
python scripts/deploy_sagemaker.py deploy --config endpoint.yaml --dry-run   print the requests as JSON, send none
python scripts/deploy_sagemaker.py status --endpoint llava
python scripts/deploy_sagemaker.py teardown --endpoint llava

Flags go over what the file says; its groups are the parameters of boto3's own operations (docs/sagemaker.md).
Credentials come from the usual places of AWS's tools. What has been done is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, Python looks beside it only

from scripts.register_autoscaling import Call
from scripts.sagemaker_deploy.account import Account
from scripts.sagemaker_deploy.errors import DeployError, SettingsError
from scripts.sagemaker_deploy.progress import Watch
from scripts.sagemaker_deploy.rollout import deploy, planned
from scripts.sagemaker_deploy.settings import CONCURRENCY, read_deployment, read_file
from scripts.sagemaker_deploy.status import NO_ENDPOINT, as_lines, status
from scripts.sagemaker_deploy.teardown import teardown

# By its name, or an address with a password or a signature in it.
_SECRET = re.compile(r"^\w*(KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH)\w*=|://\S*@|[?&]\S*(key|token|signature|sig)=", re.I)


def main(
    arguments: list[str],
    watch: Watch | None = None,
    connect: Callable[[str | None, str | None, str | None], Account] = Account,
) -> int:
    """Returns the exit status: 0 done, 1 failed, 2 not understood, 3 there is no such endpoint.

    watch: how to wait; connect: from a region, a profile and an address to an account.
    """
    options = _parser().parse_args(arguments)
    if watch is None:
        watch = Watch(say=_say, poll_s=options.poll, timeout_s=options.timeout)
    try:
        return _run(options, watch, connect)
    except DeployError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "interrupted; SageMaker goes on with what it has begun, `status` tells how it is, and the same command "
            "again does what comes after, autoscaling for one",
            file=sys.stderr,
        )
        return 130


def _run(options: argparse.Namespace, watch: Watch, connect: Callable[..., Account]) -> int:
    values = read_file(options.config) if options.config is not None else {}
    if options.command == "deploy":
        deployment = read_deployment(_overlay(values, options))
        if options.dry_run:
            conditions = {"create_endpoint": "there is no such endpoint", "update_endpoint": "there is one"}
            for call in planned(deployment):
                when = {"only_if": conditions[call.operation]} if call.operation in conditions else {}
                print(json.dumps({"service": call.service, "operation": call.operation, **when, **_shown(call)}))
            return 0
        account = connect(options.region, options.profile, options.endpoint_url)
        try:
            deploy(account, deployment, watch)
        except DeployError as error:
            raise DeployError(_without_secrets(str(error), deployment.container)) from error
        return 0
    name = options.endpoint or values.get("EndpointName")
    if not name:
        raise SettingsError("no endpoint: give --endpoint NAME, or --config FILE")
    account = connect(options.region, options.profile, options.endpoint_url)
    if options.command == "teardown":
        teardown(account, name, watch, lambda question: options.yes or _confirm(question))
        return 0
    record = status(account, name)
    if record is None:
        print(f"there is no endpoint {name} in {account.region}", file=sys.stderr)
        return 3
    print(json.dumps(record) if options.json else "\n".join(as_lines(record)))
    return 3 if record["state"] == NO_ENDPOINT else 0


def _shown(call: Call) -> dict[str, Any]:
    """Return a request's parameters without the secrets of the container's environment."""
    container = call.parameters.get("PrimaryContainer", {})
    if "Environment" not in container:
        return call.parameters
    hidden = _secrets(container)
    shown = {name: "***" if name in hidden else value for name, value in container["Environment"].items()}
    return {**call.parameters, "PrimaryContainer": {**container, "Environment": shown}}


def _without_secrets(told: str, container: Mapping[str, Any]) -> str:
    """AWS repeats in its errors what it does not like."""
    for value in sorted(_secrets(container).values(), key=len, reverse=True):
        told = told.replace(value, "***")
    return told


def _secrets(container: Mapping[str, Any]) -> dict[str, str]:
    environment = container.get("Environment", {})
    return {name: value for name, value in environment.items() if value and _SECRET.search(f"{name}={value}")}


def _overlay(values: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the file's groups with the flags that were given laid over them. Raises SettingsError."""
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for path, value in (
        ("EndpointName", options.endpoint),
        ("ExecutionRoleArn", options.role),
        ("PrimaryContainer.Image", options.image),
        ("PrimaryContainer.ModelDataUrl", options.model_data),
        ("PrimaryContainer.Mode", "MultiModel" if options.multi_model else None),
        ("VpcConfig.Subnets", options.subnet),
        ("VpcConfig.SecurityGroupIds", options.security_group),
        ("ProductionVariant.InstanceType", options.instance_type),
        ("ProductionVariant.InitialInstanceCount", options.instances),
        ("ProductionVariant.RoutingConfig", options.routing and {"RoutingStrategy": options.routing}),
        ("ProductionVariant.ContainerStartupHealthCheckTimeoutInSeconds", options.startup_timeout),
        ("ProductionVariant.ModelDataDownloadTimeoutInSeconds", options.download_timeout),
        ("AsyncInferenceConfig.OutputConfig.S3OutputPath", options.async_output),
        ("AsyncInferenceConfig.OutputConfig.S3FailurePath", options.async_failure),
        ("AsyncInferenceConfig.OutputConfig.NotificationConfig.SuccessTopic", options.success_topic),
        ("AsyncInferenceConfig.OutputConfig.NotificationConfig.ErrorTopic", options.error_topic),
        ("AsyncInferenceConfig.ClientConfig.MaxConcurrentInvocationsPerInstance", options.max_concurrent),
        ("Autoscaling.MinCapacity", options.min),
        ("Autoscaling.MaxCapacity", options.max),
        (f"Autoscaling.{CONCURRENCY}", options.target_concurrent_requests),
        (
            "DeploymentConfig.AutoRollbackConfiguration.Alarms",
            options.rollback_alarm and [{"AlarmName": name} for name in options.rollback_alarm],
        ),
    ):
        if value is not None:
            _put(values, path.split("."), value)
    for pair in options.env or ():
        name, is_pair, value = pair.partition("=")
        if not is_pair:
            if name not in os.environ:
                raise SettingsError(f"--env {name}: there is no such variable here; set it, or give NAME=VALUE")
            value = os.environ[name]
        _put(values, ["PrimaryContainer", "Environment", name], value)
    if options.canary_percent is not None:
        size = {"Type": "CAPACITY_PERCENT", "Value": options.canary_percent}
        traffic = {"Type": "CANARY", "CanarySize": size, "WaitIntervalInSeconds": options.canary_wait}
        _put(values, ["DeploymentConfig", "BlueGreenUpdatePolicy", "TrafficRoutingConfiguration"], traffic)
    return values


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    *groups, last = path
    for group in groups:
        inner = values.get(group) or {}
        if not isinstance(inner, dict):
            raise SettingsError(f"{group} must be keys and values, not {inner!r}")
        values[group] = dict(inner)
        values = values[group]
    values[last] = value


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, metavar="FILE", help="a YAML file of settings")
    common.add_argument("--endpoint", metavar="NAME")
    common.add_argument("--region")
    common.add_argument("--profile", help="of the AWS configuration")
    common.add_argument("--endpoint-url", help="of a server that stands for AWS")
    common.add_argument("--timeout", type=_seconds, default=3600, metavar="SECONDS", help="how long to wait (3600)")
    common.add_argument("--poll", type=_seconds, default=10, metavar="SECONDS", help="between two looks (10)")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    status = commands.add_parser("status", parents=[common], help="how an endpoint does, and what belongs to it")
    status.add_argument("--json", action="store_true")
    remove = commands.add_parser("teardown", parents=[common], help="delete the endpoint and all that was made for it")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    _add_deploy_flags(commands.add_parser("deploy", parents=[common], help="create an endpoint, or change it"))
    return parser


def _add_deploy_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--dry-run", action="store_true", help="print the requests as JSON and send none")
    model = flags.add_argument_group("model")
    model.add_argument("--image", metavar="URI", help="in ECR; scripts/build_and_push.sh prints it")
    model.add_argument("--role", metavar="ARN", help="as which the instances act")
    model.add_argument("--model-data", metavar="S3", help="an archive, or the prefix of several")
    model.add_argument("--multi-model", action="store_true", help="any archive below the prefix, by TargetModel")
    model.add_argument("--env", action="append", metavar="NAME[=VALUE]", help="of the container")
    model.add_argument("--subnet", action="append", metavar="ID", help="of a VPC, with --security-group")
    model.add_argument("--security-group", action="append", metavar="ID")
    variant = flags.add_argument_group("instances")
    variant.add_argument("--instance-type", metavar="TYPE")
    variant.add_argument("--instances", type=int, metavar="N", help="(1)")
    variant.add_argument("--routing", metavar="STRATEGY", help="(LEAST_OUTSTANDING_REQUESTS)")
    variant.add_argument("--startup-timeout", type=int, metavar="SECONDS", help="until /ping answers (900)")
    variant.add_argument("--download-timeout", type=int, metavar="SECONDS", help="of the model data (1200)")
    queue = flags.add_argument_group("asynchronous inference; such an endpoint takes InvokeEndpointAsync alone")
    queue.add_argument("--async-output", metavar="S3", help="where results go")
    queue.add_argument("--async-failure", metavar="S3", help="where failures go")
    queue.add_argument("--success-topic", metavar="ARN", help="of SNS")
    queue.add_argument("--error-topic", metavar="ARN", help="of SNS")
    queue.add_argument("--max-concurrent", type=int, metavar="N", help="requests at once in an instance")
    scaling = flags.add_argument_group("autoscaling")
    scaling.add_argument("--min", type=int, metavar="N", help="MinCapacity; 0 only where requests wait in a queue")
    scaling.add_argument("--max", type=int, metavar="N", help="MaxCapacity")
    scaling.add_argument("--target-concurrent-requests", type=float, metavar="N", help="real-time: for each model (4)")
    update = flags.add_argument_group("updates")
    update.add_argument("--canary-percent", type=int, metavar="N", help="move so much of the capacity first")
    update.add_argument("--canary-wait", type=int, default=300, metavar="SECONDS", help="and the rest after (300)")
    update.add_argument("--rollback-alarm", action="append", metavar="NAME", help="go back if this alarm goes off")


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise DeployError(f"{question} There is no terminal for the answer: give --yes")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        return False


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text}")
    return seconds


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
