"""TLS of the two planes."""

from __future__ import annotations

import ssl
from pathlib import Path

from torchmoor.errors import ConfigError
from torchmoor.proxy.access.credentials import read_secret_file


class Tls:
    """A plane's certificate and key, which can be read again while the server runs."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises ConfigError."""
        self._certificate = certificate
        self._key = key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.reload()

    def reload(self) -> None:
        """Read both files again: connections from now on get the new certificate. Raises ConfigError."""
        read_secret_file(self._key)
        try:
            # Tried in a context of its own, so that files that do not fit together leave the old ones in use.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certificate, self._key, _no_password)
            self.context.load_cert_chain(self._certificate, self._key, _no_password)
        except (OSError, ssl.SSLError) as error:  # the first of a missing file
            raise ConfigError(f"cannot use {self._certificate} with {self._key}: {error}") from error


def _no_password() -> str:
    raise ConfigError("listen.tls_key and listen.admin_tls_key must be keys without a password")
