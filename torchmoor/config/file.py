"""The proxy's configuration file: YAML, read once, every key checked, every error with its key and value.

What AWS defines is spelt as AWS spells it: an EndpointConfig is what boto3's create_endpoint_config takes, checked
against botocore's own service model. What is ours is spelt as in `torchmoor.config.settings`. docs/routing.md has an
example.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
import yaml
from botocore.model import Shape
from botocore.validate import ParamValidator

from torchmoor.config.asynchronous import AsyncEndpointSettings, AsyncInferenceSettings
from torchmoor.config.discovery import DiscoverySettings
from torchmoor.config.groups import read_group, read_list, read_mapping
from torchmoor.config.instances import InstanceSettings, read_discovery, read_instances
from torchmoor.config.objects import NoticeSettings, ObjectSettings
from torchmoor.config.scaling import LaunchSettings
from torchmoor.config.scaling_file import read_autoscaling
from torchmoor.config.settings import (
    AccessSettings,
    AsyncQueueSettings,
    ChatPageSettings,
    ContainerSettings,
    EndpointSettings,
    HealthSettings,
    KvAwareSettings,
    LateBindingSettings,
    LimitSettings,
    ListenSettings,
    MultiModelSettings,
    ObserveSettings,
    PrefixAwareSettings,
    ProxySettings,
    RecoverySettings,
    SessionSettings,
    TimeoutSettings,
    VariantSettings,
)
from torchmoor.errors import ConfigError
from torchmoor.proxy.instances.instance import Instance

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20

# What an EndpointConfig says of SageMaker's own machines: accepted, so that a file can be shared with create_endpoint_
# config, and not acted upon.
UNUSED_OF_CONFIG = frozenset(("Tags", "KmsKeyId", "ExecutionRoleArn", "VpcConfig", "EnableNetworkIsolation"))
UNUSED_OF_VARIANT = frozenset(
    (
        "InstanceType",
        "InstancePools",
        "VariantInstanceProvisionTimeoutInSeconds",
        "AcceleratorType",
        "CoreDumpConfig",
        "VolumeSizeInGB",
        "ModelDataDownloadTimeoutInSeconds",
        "ContainerStartupHealthCheckTimeoutInSeconds",
        "EnableSSMAccess",
        "InferenceAmiVersion",
        "CapacityReservationConfig",
    )
)
_USED_OF_CONFIG = frozenset(("EndpointConfigName", "ProductionVariants", "AsyncInferenceConfig"))
_USED_OF_VARIANT = frozenset(
    ("VariantName", "ModelName", "InitialVariantWeight", "RoutingConfig", "InitialInstanceCount")
)
GROUPS = {
    "listen": ListenSettings,
    "limits": LimitSettings,
    "timeouts": TimeoutSettings,
    "health": HealthSettings,
    "recovery": RecoverySettings,
    "access": AccessSettings,
    "container": ContainerSettings,
    "async_inference": AsyncInferenceSettings,
    "async_queue": AsyncQueueSettings,
    "objects": ObjectSettings,
    "notices": NoticeSettings,
    "observe": ObserveSettings,
    "chat_page": ChatPageSettings,
}
_KEYS_OF_ENDPOINT = {
    *("EndpointName", "EndpointConfig", "ModelDataUrl", "MultiModelConfig"),
    *("late_binding", "kv_aware", "multi_model"),
}
_KEYS_OF_FILE = {"Endpoints", "Instances", "Discovery", "Autoscaling", "launcher", "sessions", "account_id", *GROUPS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a file says."""

    proxy: ProxySettings
    instances: tuple[InstanceSettings, ...]
    discovery: tuple[DiscoverySettings, ...]
    launch: LaunchSettings

    def make_instances(self) -> list[Instance]:
        """The static list, for the registry."""
        models = {
            (endpoint.name, variant.name): variant.model
            for endpoint in self.proxy.endpoints
            for variant in endpoint.variants
        }
        return [
            Instance(
                name=each.name,
                endpoint=each.endpoint,
                variant=each.variant,
                model=models[each.endpoint, each.variant],
                host=each.host,
                port=each.port,
                management_port=each.management_port or None,
                metrics_port=each.metrics_port or None,
                capacity=each.capacity,
            )
            for each in self.instances
        ]


def read_file(path: Path, *, session_keys: str, queue: str = "") -> Configuration:
    """Read and check a file. session_keys: as in TORCHMOOR_SESSION_KEYS. queue: in the place of async_inference.queue,
    as a URL with a password is in no file that others may read. Raises ConfigError.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_FILE_BYTES} bytes")
    try:
        return parse(yaml.load(text, _StrictLoader), session_keys=session_keys, queue=queue)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse(content: object, *, session_keys: str = "", queue: str = "") -> Configuration:
    """Check a file's content; see read_file. Raises ConfigError."""
    root = read_mapping(content, "the file", _KEYS_OF_FILE)
    entries = read_list(root.get("Endpoints"), "Endpoints")
    endpoints = tuple(_read_endpoint(entry, f"Endpoints[{number}]") for number, entry in enumerate(entries))
    endpoints = _with_scaling(endpoints, entries, root.get("Autoscaling"))
    sessions = read_mapping(root.get("sessions", {}), "sessions", {"are_journaled"})
    are_journaled = sessions.get("are_journaled", False)
    if not isinstance(are_journaled, bool):
        raise ConfigError(f"sessions.are_journaled must be true or false, not {are_journaled!r}")
    account_id = root.get("account_id", "000000000000")
    if not isinstance(account_id, str):
        raise ConfigError(f"account_id must be text (put it in quotes), not {account_id!r}")
    groups: dict[str, Any] = {name: read_group(kind, root.get(name, {}), name) for name, kind in GROUPS.items()}
    if queue:
        groups["async_inference"] = replace(groups["async_inference"], queue=queue)
    proxy = ProxySettings(
        endpoints=endpoints,
        sessions=SessionSettings.parse(session_keys, are_journaled=are_journaled),
        account_id=account_id,
        **groups,
    )
    instances: tuple[InstanceSettings, ...] = ()
    if "Instances" in root or not ("Autoscaling" in root or "Discovery" in root):
        instances = read_instances(root.get("Instances"), endpoints)
    discovery = read_discovery(root["Discovery"], endpoints) if "Discovery" in root else ()
    launch = read_group(LaunchSettings, root.get("launcher", {}), "launcher")
    return Configuration(proxy=proxy, instances=instances, discovery=discovery, launch=launch)


def _with_scaling(
    endpoints: Sequence[EndpointSettings], entries: Sequence[Mapping[str, Any]], autoscaling: object
) -> tuple[EndpointSettings, ...]:
    """The endpoints with what the group Autoscaling says of their variants, if anything. entries: their own, read."""
    counts = {
        (endpoint.name, variant["VariantName"]): variant.get("InitialInstanceCount")
        for endpoint, entry in zip(endpoints, entries, strict=True)
        for variant in entry["EndpointConfig"]["ProductionVariants"]
    }
    found = {} if autoscaling is None else read_autoscaling(autoscaling, counts)
    for (endpoint_name, variant_name), count in counts.items():
        if count is not None and (endpoint_name, variant_name) not in found:
            logger.warning(
                "without effect here, as there is no Autoscaling key=InitialInstanceCount endpoint=%s variant=%s",
                endpoint_name,
                variant_name,
            )
    return tuple(
        replace(
            endpoint,
            variants=tuple(
                replace(variant, scaling=found.get((endpoint.name, variant.name))) for variant in endpoint.variants
            ),
        )
        for endpoint in endpoints
    )


def _read_endpoint(entry: object, where: str) -> EndpointSettings:
    values = read_mapping(entry, where, _KEYS_OF_ENDPOINT)
    config = values.get("EndpointConfig")
    check_endpoint_config(config, f"{where}.EndpointConfig")
    assert isinstance(config, Mapping)  # just checked
    name = values.get("EndpointName", config["EndpointConfigName"])
    if not isinstance(name, str):
        raise ConfigError(f"{where}.EndpointName must be text, not {name!r}")
    late_binding = values.get("late_binding")
    kv_aware = read_group(KvAwareSettings, values.get("kv_aware", {}), f"{where}.kv_aware")
    return EndpointSettings(
        name=name,
        variants=tuple(
            _read_variant(variant, f"{where}.EndpointConfig.ProductionVariants[{number}]", kv_aware)
            for number, variant in enumerate(config["ProductionVariants"])
        ),
        late_binding=None
        if late_binding is None
        else read_group(LateBindingSettings, late_binding, f"{where}.late_binding"),
        multi_model=_read_multi_model(values, where),
        async_inference=_read_async_inference(config.get("AsyncInferenceConfig"), where),
    )


def _read_multi_model(values: Mapping[str, Any], where: str) -> MultiModelSettings | None:
    """What CreateModel says of a container with many models. Where they are is for the instances to know."""
    if "MultiModelConfig" not in values:
        for key in ("ModelDataUrl", "multi_model"):
            if key in values:
                raise ConfigError(f"{where}.{key} is only for an endpoint with MultiModelConfig")
        return None
    config = read_mapping(values["MultiModelConfig"], f"{where}.MultiModelConfig", {"ModelCacheSetting"})
    setting = config.get("ModelCacheSetting", "Enabled")
    if setting not in ("Enabled", "Disabled"):
        raise ConfigError(
            f"{where}.MultiModelConfig.ModelCacheSetting must be Enabled or Disabled (in quotes), not {setting!r}"
        )
    if "ModelDataUrl" in values:
        logger.warning(
            "without effect here, set TORCHMOOR_HANDLER_MANY_SOURCE of the instances key=%s.ModelDataUrl", where
        )
    if setting == "Disabled":
        logger.warning("instances need TORCHMOOR_HANDLER_MANY_CACHE=disabled too key=%s.MultiModelConfig", where)
    group = dict(read_mapping(values.get("multi_model", {}), f"{where}.multi_model", {"hot_outstanding", "max_models"}))
    return read_group(MultiModelSettings, {**group, "is_cached": setting == "Enabled"}, f"{where}.multi_model")


def _read_async_inference(config: Mapping[str, Any] | None, where: str) -> AsyncEndpointSettings | None:
    """An AsyncInferenceConfig that botocore has found to be one."""
    if config is None:
        return None
    output = config["OutputConfig"]
    if "KmsKeyId" in output:
        logger.warning("without effect here key=%s.EndpointConfig.AsyncInferenceConfig.OutputConfig.KmsKeyId", where)
    notification = output.get("NotificationConfig", {})
    return AsyncEndpointSettings(
        output_path=output.get("S3OutputPath", ""),
        failure_path=output.get("S3FailurePath", ""),
        success_topic=notification.get("SuccessTopic", ""),
        error_topic=notification.get("ErrorTopic", ""),
        include_response_in=tuple(notification.get("IncludeInferenceResponseIn", ())),
        max_concurrent_per_instance=config.get("ClientConfig", {}).get("MaxConcurrentInvocationsPerInstance"),
    )


def _read_variant(variant: Mapping[str, Any], where: str, kv_aware: KvAwareSettings) -> VariantSettings:
    """A production variant that botocore has found to be one."""
    if "ModelName" not in variant:
        raise ConfigError(f"{where}.ModelName is missing: the name under which instances serve the model")
    routing = variant.get("RoutingConfig", {"RoutingStrategy": "RANDOM"})  # SageMaker's own default
    strategy, prefix = routing["RoutingStrategy"], routing.get("PrefixAwareRoutingConfig")
    where_prefix = f"{where}.RoutingConfig.PrefixAwareRoutingConfig"
    if strategy != "PREFIX_AWARE" and prefix is not None:
        raise ConfigError(f"{where_prefix} is only for PREFIX_AWARE, not for {strategy}")
    if strategy == "PREFIX_AWARE":
        for key in ("PrefixLength", "ConcurrencyThreshold"):
            if key not in (prefix or {}):
                raise ConfigError(f"{where_prefix}.{key} is missing: PREFIX_AWARE needs it")
    return VariantSettings(
        name=variant["VariantName"],
        model=variant["ModelName"],
        weight=float(variant.get("InitialVariantWeight", 1.0)),
        routing_strategy=strategy,
        kv_aware=kv_aware,
        prefix_aware=PrefixAwareSettings()
        if prefix is None
        else PrefixAwareSettings(
            prefix_length=prefix["PrefixLength"], concurrency_threshold=prefix["ConcurrencyThreshold"]
        ),
    )


def check_endpoint_config(config: object, where: str) -> None:
    """Raise ConfigError unless boto3's create_endpoint_config would take it and this proxy can do what it says."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} must be what boto3's create_endpoint_config takes, not {config!r}")
    shape = _endpoint_config_shape()
    report = ParamValidator().validate(_with_counts(config), shape)
    if report.has_errors():
        raise ConfigError(f"{where}: {'; '.join(report.generate_report().splitlines())}")
    _check_constraints(config, shape, where)
    _check_used(config, _USED_OF_CONFIG, UNUSED_OF_CONFIG, where)
    for number, variant in enumerate(config["ProductionVariants"]):
        _check_used(variant, _USED_OF_VARIANT, UNUSED_OF_VARIANT, f"{where}.ProductionVariants[{number}]")


def _with_counts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with one instance where it says none: that is allowed here, and not in the service's model."""
    variants = config.get("ProductionVariants")
    if not isinstance(variants, list):
        return config
    return {
        **config,
        "ProductionVariants": [
            {**each, "InitialInstanceCount": 1}
            if isinstance(each, Mapping) and each.get("InitialInstanceCount") == 0
            else each
            for each in variants
        ],
    }


@cache
def _endpoint_config_shape() -> Shape:
    """As the installed botocore has it."""
    service = botocore.session.Session().get_service_model("sagemaker")
    return service.operation_model("CreateEndpointConfig").input_shape


def _check_constraints(value: Any, shape: Shape, where: str) -> None:
    """What the service checks and botocore's validator does not: greatest values, lengths, patterns, choices."""
    if shape.type_name == "structure":
        for key, item in value.items():
            _check_constraints(item, shape.members[key], f"{where}.{key}")
    elif shape.type_name == "list":
        for number, item in enumerate(value):
            _check_constraints(item, shape.member, f"{where}[{number}]")
    size = len(value) if isinstance(value, (str, list)) else value
    most = shape.metadata.get("max")
    if most is not None and isinstance(size, (int, float)) and size > most:
        raise ConfigError(f"{where} must be {most} at most, not {value!r}")
    pattern = shape.metadata.get("pattern")
    if pattern is not None and isinstance(value, str) and not re.fullmatch(pattern, value):
        raise ConfigError(f"{where} must match {pattern}, not {value!r}")
    choices = getattr(shape, "enum", None)
    if choices and value not in choices:
        raise ConfigError(f"{where} must be one of {', '.join(choices)}, not {value!r}")


def _check_used(values: Mapping[str, Any], used: frozenset[str], unused: frozenset[str], where: str) -> None:
    """Refuse what would change what clients see and is not served here; say what is without effect."""
    for key in values:
        if key in unused:
            logger.warning("without effect here key=%s.%s", where, key)
        elif key not in used:
            raise ConfigError(f"{where}.{key} is not supported: leave it out")


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice, where YAML would let the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)
