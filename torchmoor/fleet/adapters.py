"""Where the adapters of an endpoint's model are, from the command line and the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchmoor.config.routing import MultiModelSettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.many import MANY

SOURCE = "TORCHMOOR_HANDLER_ADAPTERS_SOURCE"


def adapter_settings(environment: Mapping[str, str]) -> MultiModelSettings | None:
    """Return the settings of an endpoint whose instances have this environment; None without adapters."""
    return MultiModelSettings(are_adapters=True) if environment.get(SOURCE) else None


def adapter_environment(endpoints: Sequence[str], adapters: str) -> dict[str, str]:
    """Return the instances' variables. adapters: a directory, file://, an S3 prefix, or "". Raises ConfigError."""
    if not adapters:
        return {}
    if len(endpoints) != 1 or MANY in endpoints:
        raise ConfigError("--adapters needs exactly one endpoint, whose model they belong to")
    if adapters.startswith("s3://"):
        return {SOURCE: adapters}
    folder = Path(adapters.removeprefix("file://")).resolve()
    if not folder.is_dir():
        raise ConfigError(f"--adapters: there is no directory {folder}")
    return {SOURCE: str(folder)}
