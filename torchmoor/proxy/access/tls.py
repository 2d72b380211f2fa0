"""TLS certificates of the two planes, reloaded while the server runs."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from torchmoor.errors import ConfigError
from torchmoor.proxy.access.credential_sources import read_secret_file

logger = logging.getLogger(__name__)


class Tls:
    """A plane's certificate and key."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises ConfigError."""
        self._certificate = certificate
        self._key = key
        self.reload()

    def reload(self) -> None:
        """Read both files again, for new connections.

        Raises ConfigError, and keeps the old certificate, if they are unusable.
        """
        read_secret_file(self._key)
        # A new context, because one that has a certificate for another kind of key (ECDSA, RSA) would keep it.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # With TLS 1.3, tickets follow the handshake. In Python 3.11, a thread that receives them can lose what another
        # thread of the client sends meanwhile: websockets' threads so lost 8 of 1,500 opening handshakes.
        context.num_tickets = 0
        try:
            context.load_cert_chain(self._certificate, self._key, _no_password)
        except (OSError, ssl.SSLError) as error:  # OSError: a missing file
            raise ConfigError(f"cannot use {self._certificate} with {self._key}: {error}") from error
        self._context = context

    def get_context(self) -> ssl.SSLContext:
        return self._context


def make_tls(certificate: str, key: str) -> Tls | None:
    """Return the TLS of a plane; None if it has no certificate. Raises ConfigError."""
    return Tls(Path(certificate), Path(key)) if certificate else None


def reload_tls(tls: Tls) -> None:
    """Read a renewed certificate; log an error if it cannot be used."""
    try:
        tls.reload()
        logger.info("certificate reloaded")
    except ConfigError as error:
        logger.error("the old certificate stays in use: %s", error)


def _no_password() -> str:
    raise ConfigError("listen.tls_key and listen.admin_tls_key must be keys without a password")
