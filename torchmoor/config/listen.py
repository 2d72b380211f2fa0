"""Settings of the two planes' addresses, certificates and processes."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, model_validator

from torchmoor.config.group import OptionalPort, SettingsGroup, Texts, refusal

_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[?[0-9a-f.]*(:[0-9a-f.]*){2,7}\]?", re.ASCII | re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.ASCII)
_ALL_ADDRESSES = {"0.0.0.0", "::"}
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class ListenSettings(SettingsGroup, title="listen"):
    """Addresses, ports, certificates and processes. Port 0 takes any free port."""

    host: str = Field("127.0.0.1", description="Address of the runtime API.")
    port: OptionalPort = Field(8080, description="Port of the runtime API; 0 takes any free one.")
    admin_host: str = Field(
        "127.0.0.1", description="Address of the admin plane. An address other than loopback needs an admin token."
    )
    admin_port: OptionalPort = Field(9080, description="Port of the admin plane; 0 takes any free one.")
    tls_certificate: str = Field(
        "",
        description="The runtime API's certificate: a PEM file that includes the certificates that sign it. "
        "SIGHUP reads it again. Empty: plain HTTP.",
    )
    tls_key: str = Field("", description="The certificate's private key: a PEM file without a password.")
    admin_tls_certificate: str = Field("", description="The admin plane's certificate. Empty: plain HTTP.")
    admin_tls_key: str = Field("", description="The private key of the admin plane's certificate.")
    allowed_hosts: Texts = Field(
        (),
        description="A host name or address, without a port, that requests may have in Host and Origin, in addition "
        "to loopback's. A server that listens on loopback always checks these headers; on another address, it checks "
        "them only if a name is set here. Repeatable.",
    )
    allowed_origins: Texts = Field(
        (),
        description="An origin whose pages may use the runtime API from the browser (CORS): scheme://host or "
        "scheme://host:port, as browsers send it. They may call nothing of the control plane or the admin plane. "
        "Repeatable.",
    )
    processes: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Proxy processes that share the port; one carries about 10,000 requests per second."
    )

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise refusal(
                    "allowed_hosts",
                    f"must be host names or addresses without scheme, port, final dot or *, not {host!r}",
                )
        return self

    @model_validator(mode="after")
    def _check_origins(self) -> Self:
        for origin in self.allowed_origins:
            default_port = _DEFAULT_PORTS.get(origin.partition(":")[0])
            if not _ORIGIN.fullmatch(origin) or (default_port and origin.endswith(default_port)):
                raise refusal(
                    "allowed_origins",
                    "must be origins as browsers send them, such as https://chat.example or http://localhost:3000 "
                    f"(lower case, no path, no default port, no *), not {origin!r}",
                )
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        hosts = {self.host, self.admin_host}
        if self.port and self.port == self.admin_port and (len(hosts) == 1 or hosts & _ALL_ADDRESSES):
            raise refusal("admin_port", f"and listen.port are both {self.port}: each plane needs a port of its own")
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        for prefix in ("", "admin_"):
            pair = f"{prefix}tls_certificate", f"{prefix}tls_key"
            given = [name for name in pair if getattr(self, name)]
            if len(given) == 1:
                [missing] = {*pair} - {*given}
                raise refusal(given[0], f"needs listen.{missing}: give both, or neither")
        return self

    @property
    def runtime_scheme(self) -> str:
        """The scheme of the runtime API's address."""
        return "https" if self.tls_certificate else "http"

    def runtime_url(self, port: int) -> str:
        """Return the runtime API's address at a port, which is another one than the setting's if that is 0."""
        return _url(self.runtime_scheme, self.host, port)

    def admin_url(self, port: int) -> str:
        """Return the admin plane's address at a port, as `runtime_url`."""
        return _url("https" if self.admin_tls_certificate else "http", self.admin_host, port)


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
