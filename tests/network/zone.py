"""Run a real DNS server, dnsmasq, for one zone that the test controls."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.network.hosts import Network, stop

SERVICE = "_inference._tcp.llava.zone.test"
PORT = 8085


class Zone:
    """Instances by name with addresses, as SRV records; dnsmasq reads them at its start, so it is restarted."""

    def __init__(self, network: Network, host: str, folder: Path) -> None:
        self._network = network
        self._host = host
        self._folder = folder
        self._server: subprocess.Popen[str] | None = None
        self._lines: list[str] = []

    def name(self, instances: Mapping[str, str | list[str]]) -> None:
        """Publish these names from now on."""
        self._lines = []
        for name, addresses in instances.items():
            self._lines.append(f"srv-host={SERVICE},{name}.zone.test,{PORT}")
            for address in [addresses] if isinstance(addresses, str) else addresses:
                self._lines.append(f"host-record={name}.zone.test,{address}")
        self.stop()
        self.start()

    def name_addresses(self, dns_name: str, addresses: list[str]) -> None:
        """Publish a name with addresses instead of services."""
        self._lines = [f"host-record={dns_name},{address}" for address in addresses]
        self.stop()
        self.start()

    def start(self) -> None:
        """Start the server with the current records."""
        file = self._folder / "dnsmasq.conf"
        file.write_text("".join(f"{line}\n" for line in self._lines))
        self._server = self._network.start(
            self._host,
            *("dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", "--local=/test/", "--local-ttl=1"),
            *("--user=root", "--pid-file=", f"--conf-file={file}"),
            log=self._folder / "dnsmasq.log",
        )

    def stop(self) -> None:
        """Stop the server."""
        if self._server is not None:
            stop(self._server)
            self._server = None
