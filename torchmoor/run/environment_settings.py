"""What the environment adds to the settings of `up`, `serve` and the container: credentials and the container mode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchmoor.config.settings import ProxySettings
from torchmoor.fleet.model_sources import read_container
from torchmoor.proxy.access.credential_sources import read_credentials
from torchmoor.proxy.access.exposure import check_exposure


def with_environment(settings: ProxySettings, environ: Mapping[str, str], *, is_open: bool | None) -> ProxySettings:
    """Return settings with the credentials and the container mode of the environment. Raises ConfigError.

    is_open: whether an address other than loopback may go without credentials; None if a platform guards the port.
    """
    keys_file = settings.access.keys_file
    credentials = read_credentials(environ, Path(keys_file) if keys_file else None)
    check_exposure(settings.listen, credentials, is_open=not credentials.guards_data if is_open is None else is_open)
    return settings.replace(credentials=credentials, container=read_container(environ, settings.container))
