"""Deploy an endpoint on SageMaker, show its status, or delete it with all resources that were created for it.

python scripts/deploy_sagemaker.py deploy --config endpoint.yaml             create it, or update it to these settings
python scripts/deploy_sagemaker.py deploy --config endpoint.yaml --dry-run   print the requests as JSON, send none
python scripts/deploy_sagemaker.py status --endpoint llava
python scripts/deploy_sagemaker.py teardown --endpoint llava

Options override the file, whose groups are the parameters of boto3's operations (docs/sagemaker.md). Credentials come
from the AWS configuration and environment. Each command can be repeated: it skips the steps that are done.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python searches only this file's folder

from scripts.register_autoscaling import Call
from scripts.sagemaker_deploy.account import Account
from scripts.sagemaker_deploy.errors import DeployError, SettingsError
from scripts.sagemaker_deploy.progress import Watch
from scripts.sagemaker_deploy.rollout import deploy, planned
from scripts.sagemaker_deploy.settings import CONCURRENCY, read_deployment, read_file
from scripts.sagemaker_deploy.status import NO_ENDPOINT, as_lines, status
from scripts.sagemaker_deploy.teardown import teardown

# A variable whose name suggests a secret, or a URL that contains a password or a signature.
_SECRET = re.compile(r"^\w*(KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH)\w*=|://\S*@|[?&]\S*(key|token|signature|sig)=", re.I)


def main(
    arguments: list[str],
    watch: Watch | None = None,
    connect: Callable[[str | None, str | None, str | None], Account] = Account,
) -> int:
    """Run a command. Return the exit status: 0 done, 1 failed, 2 invalid arguments, 3 no such endpoint.

    watch: how to wait; connect: makes an account from region, profile and endpoint URL.
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
            "interrupted; SageMaker continues the operation that it has begun. `status` shows its progress; run the "
            "same command again for the steps after it, such as autoscaling",
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


def _without_secrets(message: str, container: Mapping[str, Any]) -> str:
    """Mask the container's secrets in an error's message, since AWS's errors quote invalid values."""
    for value in sorted(_secrets(container).values(), key=len, reverse=True):
        message = message.replace(value, "***")
    return message


def _secrets(container: Mapping[str, Any]) -> dict[str, str]:
    environment = container.get("Environment", {})
    return {name: value for name, value in environment.items() if value and _SECRET.search(f"{name}={value}")}


def _overlay(values: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the file's groups, overridden by the given options. Raises SettingsError."""
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
    common.add_argument("--endpoint", metavar="NAME", help="name of the endpoint")
    common.add_argument("--region", help="default: the region of the AWS configuration")
    common.add_argument("--profile", help="profile of the AWS configuration")
    common.add_argument("--endpoint-url", help="URL of an emulated AWS")
    common.add_argument("--timeout", type=_seconds, default=3600, metavar="SECONDS", help="longest wait (3600)")
    common.add_argument("--poll", type=_seconds, default=10, metavar="SECONDS", help="between two status requests (10)")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    status = commands.add_parser("status", parents=[common], help="show an endpoint's state and resources")
    status.add_argument("--json", action="store_true", help="print one line of JSON")
    remove = commands.add_parser("teardown", parents=[common], help="delete an endpoint and all resources made for it")
    remove.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    _add_deploy_flags(commands.add_parser("deploy", parents=[common], help="create or update an endpoint"))
    return parser


def _add_deploy_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--dry-run", action="store_true", help="print the requests as JSON and send none")
    model = flags.add_argument_group("model")
    model.add_argument("--image", metavar="URI", help="image in ECR, as scripts/build_and_push.sh prints it")
    model.add_argument("--role", metavar="ARN", help="role of the instances")
    model.add_argument("--model-data", metavar="S3", help="an archive, or a prefix of archives")
    model.add_argument(
        "--multi-model", action="store_true", help="serve any archive below the prefix, selected by TargetModel"
    )
    model.add_argument(
        "--env", action="append", metavar="NAME[=VALUE]", help="environment of the container; without =VALUE, from here"
    )
    model.add_argument("--subnet", action="append", metavar="ID", help="subnet of a VPC; requires --security-group")
    model.add_argument("--security-group", action="append", metavar="ID", help="security group of the VPC")
    variant = flags.add_argument_group("instances")
    variant.add_argument("--instance-type", metavar="TYPE", help="such as ml.g5.xlarge")
    variant.add_argument("--instances", type=int, metavar="N", help="initial number of instances (1)")
    variant.add_argument("--routing", metavar="STRATEGY", help="routing strategy (LEAST_OUTSTANDING_REQUESTS)")
    variant.add_argument("--startup-timeout", type=int, metavar="SECONDS", help="until /ping answers (900)")
    variant.add_argument("--download-timeout", type=int, metavar="SECONDS", help="of the model data (1200)")
    queue = flags.add_argument_group("asynchronous inference; such an endpoint accepts only InvokeEndpointAsync")
    queue.add_argument("--async-output", metavar="S3", help="prefix of results")
    queue.add_argument("--async-failure", metavar="S3", help="prefix of failures")
    queue.add_argument("--success-topic", metavar="ARN", help="SNS topic of results")
    queue.add_argument("--error-topic", metavar="ARN", help="SNS topic of failures")
    queue.add_argument("--max-concurrent", type=int, metavar="N", help="concurrent requests per instance")
    scaling = flags.add_argument_group("autoscaling")
    scaling.add_argument("--min", type=int, metavar="N", help="MinCapacity; 0 only for asynchronous endpoints")
    scaling.add_argument("--max", type=int, metavar="N", help="MaxCapacity")
    scaling.add_argument(
        "--target-concurrent-requests", type=float, metavar="N", help="real-time endpoints: requests per model (4)"
    )
    update = flags.add_argument_group("updates")
    update.add_argument("--canary-percent", type=int, metavar="N", help="first move this percentage of the capacity")
    update.add_argument("--canary-wait", type=int, default=300, metavar="SECONDS", help="before the rest moves (300)")
    update.add_argument("--rollback-alarm", action="append", metavar="NAME", help="roll back if this alarm fires")


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
