"""The group Endpoints of the configuration file: EndpointConfig in AWS's form, and the proxy's own keys beside it.

An EndpointConfig is what boto3's create_endpoint_config takes. It is checked against botocore's own service model.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torchmoor.config.async_inference import AsyncEndpointSettings
from torchmoor.config.aws import check_constraints, check_input, input_shape
from torchmoor.config.group import SettingsGroup, read_mapping
from torchmoor.config.routing import (
    EndpointSettings,
    LateBindingSettings,
    MultiModelSettings,
    PrefixAwareSettings,
    VariantSettings,
)
from torchmoor.config.scaling import ScalingSettings
from torchmoor.errors import ConfigError
from torchmoor.wire.handler_variables import MODELS_CACHE, MODELS_SOURCE

logger = logging.getLogger(__name__)

# Keys about SageMaker's own machines. They are accepted, so that create_endpoint_config can use the same file, and have
# no effect.
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
# The groups of an entry that apply to each of its variants; PrefixAwareRoutingConfig has those of PREFIX_AWARE
VARIANT_GROUPS: dict[str, type[SettingsGroup]] = {
    name: field.annotation
    for name, field in VariantSettings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, SettingsGroup) and name != "prefix_aware"
}
_KEYS = {
    *("EndpointName", "EndpointConfig", "ModelDataUrl", "MultiModelConfig"),
    *("late_binding", *VARIANT_GROUPS, "multi_model", "adapters"),
}
_MODEL_KEYS = {name for name, field in MultiModelSettings.model_fields.items() if field.description}
ScalingOfVariants = Mapping[tuple[str, str], ScalingSettings]


def check_endpoint(entry: object, where: str) -> tuple[str, Mapping[str, Any]]:
    """Return an entry's endpoint name and EndpointConfig. Raises ConfigError."""
    values = read_mapping(entry, where, _KEYS)
    config = values.get("EndpointConfig")
    check_endpoint_config(config, f"{where}.EndpointConfig")
    assert isinstance(config, Mapping)  # just checked
    name = values.get("EndpointName", config["EndpointConfigName"])
    if not isinstance(name, str):
        raise ConfigError(f"{where}.EndpointName must be text, not {name!r}")
    return name, config


def read_endpoint(values: Mapping[str, Any], name: str, where: str, scaling: ScalingOfVariants) -> EndpointSettings:
    """Return the settings of an entry that check_endpoint accepts. Raises ConfigError."""
    config = values["EndpointConfig"]
    late_binding = values.get("late_binding")
    groups = {key: group.read(values.get(key, {}), f"{where}.{key}") for key, group in VARIANT_GROUPS.items()}
    return EndpointSettings(
        name=name,
        variants=tuple(
            _read_variant(
                variant,
                f"{where}.EndpointConfig.ProductionVariants[{number}]",
                groups,
                scaling.get((name, variant["VariantName"])),
            )
            for number, variant in enumerate(config["ProductionVariants"])
        ),
        late_binding=None if late_binding is None else LateBindingSettings.read(late_binding, f"{where}.late_binding"),
        multi_model=_read_multi_model(values, where),
        async_inference=read_async_inference(config.get("AsyncInferenceConfig"), where),
    )


def _read_multi_model(values: Mapping[str, Any], where: str) -> MultiModelSettings | None:
    """Return what CreateModel's container definition says, or the key `adapters`.

    Where models and adapters are is a setting of the instances.
    """
    if "MultiModelConfig" not in values:
        return _read_adapters(values, where)
    if "adapters" in values:
        raise ConfigError(f"{where} has adapters of one model, or MultiModelConfig, but not both")
    config = read_mapping(values["MultiModelConfig"], f"{where}.MultiModelConfig", {"ModelCacheSetting"})
    setting = config.get("ModelCacheSetting", "Enabled")
    if setting not in ("Enabled", "Disabled"):
        raise ConfigError(
            f"{where}.MultiModelConfig.ModelCacheSetting must be Enabled or Disabled (in quotes), not {setting!r}"
        )
    if "ModelDataUrl" in values:
        logger.warning("without effect here, set %s of the instances key=%s.ModelDataUrl", MODELS_SOURCE, where)
    if setting == "Disabled":
        logger.warning("instances need %s=disabled too key=%s.MultiModelConfig", MODELS_CACHE, where)
    group = read_mapping(values.get("multi_model", {}), f"{where}.multi_model", _MODEL_KEYS)
    return MultiModelSettings.read({**group, "is_cached": setting == "Enabled"}, f"{where}.multi_model")


def _read_adapters(values: Mapping[str, Any], where: str) -> MultiModelSettings | None:
    """Return the settings of an endpoint with one model: those of its adapters, if it has any."""
    for key in ("ModelDataUrl", "multi_model"):
        if key in values:
            raise ConfigError(f"{where}.{key} is only for an endpoint with MultiModelConfig")
    if "adapters" not in values:
        return None
    group = read_mapping(values["adapters"], f"{where}.adapters", _MODEL_KEYS)
    return MultiModelSettings.read({**group, "are_adapters": True}, f"{where}.adapters")


def read_async_inference(config: Mapping[str, Any] | None, where: str) -> AsyncEndpointSettings | None:
    """Return the settings of an AsyncInferenceConfig that botocore accepts."""
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


def _read_variant(
    variant: Mapping[str, Any], where: str, groups: Mapping[str, Any], scaling: ScalingSettings | None
) -> VariantSettings:
    """Return the settings of a production variant that botocore accepts. groups: those of its endpoint."""
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
        **groups,
        prefix_aware=PrefixAwareSettings()
        if prefix is None
        else PrefixAwareSettings(
            prefix_length=prefix["PrefixLength"], concurrency_threshold=prefix["ConcurrencyThreshold"]
        ),
        scaling=scaling,
    )


def check_endpoint_config(config: object, where: str, *, also_used: Collection[str] = ()) -> None:
    """Raise ConfigError unless boto3's create_endpoint_config accepts it and this proxy can serve it.

    also_used: keys of variants that have an effect for this caller.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} must be what boto3's create_endpoint_config takes, not {config!r}")
    shape = input_shape("sagemaker", "CreateEndpointConfig")
    check_input(_with_counts(config), shape, where)
    check_constraints(config, shape, where)
    _check_used(config, _USED_OF_CONFIG, UNUSED_OF_CONFIG, where)
    for number, variant in enumerate(config["ProductionVariants"]):
        unused = UNUSED_OF_VARIANT.difference(also_used)
        _check_used(variant, _USED_OF_VARIANT.union(also_used), unused, f"{where}.ProductionVariants[{number}]")


def _with_counts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with 1 for each instance count of 0, which this proxy allows and the service's model does not."""
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


def _check_used(values: Mapping[str, Any], used: frozenset[str], unused: frozenset[str], where: str) -> None:
    """Refuse a key that this proxy does not implement, unless it concerns SageMaker's machines only."""
    for key in values:
        if key in unused:
            logger.warning("without effect here key=%s.%s", where, key)
        elif key not in used:
            raise ConfigError(f"{where}.{key} is not supported: leave it out")
