"""Where the adapters of an endpoint's model are, from the command line and the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchmoor.config.routing import MultiModelSettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.many import MANY, find_source

SOURCE = "TORCHMOOR_HANDLER_ADAPTERS_SOURCE"


def adapter_settings(environment: Mapping[str, str]) -> MultiModelSettings | None:
    """Return the settings of an endpoint whose instances have this environment; None without adapters."""
    return MultiModelSettings(are_adapters=True) if environment.get(SOURCE) else None


def adapter_environment(endpoints: Sequence[str], adapters: str) -> dict[str, str]:
    """Return the instances' variables. adapters: a directory, file://, an S3 prefix, or "". Raises ConfigError."""
    if not adapters:
        return {}
    if MANY in endpoints:
        raise ConfigError(
            f"--adapters needs exactly one endpoint of one model; --endpoint {MANY} has many, which --models names"
        )
    if len(endpoints) != 1:
        raise ConfigError("--adapters needs exactly one endpoint, whose model they belong to")
    return {SOURCE: find_source("--adapters", adapters)}
