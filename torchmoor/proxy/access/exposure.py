"""Check of the listening addresses: a plane that other machines reach needs credentials, unless --no-auth is given."""

from __future__ import annotations

import ipaddress
import logging

from torchmoor.config.credentials import Credentials
from torchmoor.config.listen import ListenSettings
from torchmoor.errors import ConfigError

logger = logging.getLogger(__name__)


def check_exposure(listen: ListenSettings, credentials: Credentials, *, is_open: bool) -> None:
    """Raise ConfigError if other machines could use a plane without credentials.

    is_open: --no-auth was given, which allows it for the data plane only.
    """
    if is_open and credentials.guards_data:
        raise ConfigError("--no-auth allows every client, but there are access keys or tokens: leave one of them out")
    if not is_loopback(listen.host):
        if not (is_open or credentials.guards_data):
            raise ConfigError(
                f"on {listen.host} every client that reaches this machine could use it: give access keys or tokens (up "
                "--keys FILE, access.keys_file of serve, TORCHMOOR_ACCESS_KEYS or TORCHMOOR_TOKENS), or allow it with "
                "--no-auth"
            )
        if credentials.tokens and not listen.tls_certificate:
            logger.warning("bearer tokens cross the network in clear: set a TLS certificate, or end TLS in front")
    if not is_loopback(listen.admin_host) and not credentials.admin_token:
        raise ConfigError(
            f"the admin plane on {listen.admin_host} needs a token: TORCHMOOR_ADMIN_TOKEN, or a line `admin TOKEN` in "
            "the keys' file"
        )
    if not is_loopback(listen.admin_host) and not listen.admin_tls_certificate:
        logger.warning("the admin token crosses the network in clear: set listen.admin_tls_certificate and its key")


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches the address. Raises ConfigError if it is not an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ConfigError(f"a host must be an address of this machine or localhost, not {host!r}") from error
