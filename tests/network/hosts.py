"""Hosts in a network of their own: network namespaces, connected by a bridge in another namespace.

The network is isolated from this machine's own network and does not change it.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.tools import require

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "iptables", "ip6tables", "dnsmasq")
PREFIX = "torchmoor-"
SWITCH = "switch"
CLONE_NEWNET = 0x40000000
STOP_S = 20.0

T = TypeVar("T")


class Network:
    """Hosts by name. Each has an IPv4 address, and an IPv6 address with the same last part."""

    def __init__(self) -> None:
        self._prefix = f"{PREFIX}{os.getpid()}-"
        self._hosts: list[str] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._make(SWITCH)
        ip("-n", self.namespace(SWITCH), "link", "add", "bridge", "up", "type", "bridge", "forward_delay", "0")

    def namespace(self, host: str) -> str:
        return self._prefix + host

    def _make(self, host: str) -> None:
        ip("netns", "add", self.namespace(host))
        self._hosts.append(host)
        ip("-n", self.namespace(host), "link", "set", "lo", "up")

    def add(self, host: str, number: int, *, nameserver: str = "") -> str:
        """Add a host at 10.77.0.number and return its address. nameserver: the entry in its resolv.conf."""
        self._make(host)
        here, there = self.namespace(host), self.namespace(SWITCH)
        ip("-n", there, "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", here)
        ip("-n", there, "link", "set", host, "master", "bridge", "up")
        ip("-n", here, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
        ip("-n", here, "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
        ip("-n", here, "link", "set", "eth0", "up")
        if nameserver:  # `ip netns exec` mounts it for the program that it runs
            folder = Path("/etc/netns") / here
            folder.mkdir(parents=True)
            (folder / "resolv.conf").write_text(f"search wrong.test\noptions ndots:5\nnameserver {nameserver}\n")
        return f"10.77.0.{number}"

    def start(self, host: str, *command: str, log: Path, **options: Any) -> subprocess.Popen[str]:
        """Start a program on a host; it is stopped with the network at the latest."""
        with log.open("a") as errors:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace(host), *command],
                cwd=ROOT,
                stderr=errors,
                text=True,
                start_new_session=True,
                **options,
            )
        self._processes.append(process)
        return process

    def start_python(self, host: str, *arguments: str, log: Path, **options: Any) -> subprocess.Popen[str]:
        """Start a Python program of this tree with this interpreter."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
        return self.start(host, sys.executable, *arguments, log=log, env=environment, **options)

    def inside(self, host: str, work: Callable[[], T]) -> T:
        """Run code in a host's network; connections that it opens stay there."""
        found: list[T] = []

        def run() -> None:
            with open(f"/run/netns/{self.namespace(host)}") as file:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            found.append(work())

        errors: list[BaseException] = []

        def guarded() -> None:
            try:
                run()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return found[0]

    def get(self, host: str, url: str) -> bytes:
        """Fetch a URL from a host."""

        def ask() -> bytes:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return bytes(answer.read())

        return self.inside(host, ask)

    # Faults

    def cut_off(self, host: str) -> None:
        """Drop everything that the host sends and receives."""
        for chain in ("INPUT", "OUTPUT"):
            self._rule(host, chain, "!", "-i" if chain == "INPUT" else "-o", "lo", "-j", "DROP")

    def reject(self, host: str) -> None:
        """Answer everything that is sent to the host with a reset."""
        self._rule(host, "INPUT", "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")

    def lose(self, host: str, fraction: float) -> None:
        """Drop this share of the packets that are sent to the host."""
        self._rule(host, "INPUT", "-m", "statistic", "--mode", "random", "--probability", str(fraction), "-j", "DROP")

    def heal(self, host: str) -> None:
        """Remove a host's faults."""
        for tool in ("iptables", "ip6tables"):
            run("ip", "netns", "exec", self.namespace(host), tool, "-w", "-F")

    def _rule(self, host: str, *rule: str) -> None:
        for tool in ("iptables", "ip6tables"):
            run("ip", "netns", "exec", self.namespace(host), tool, "-w", "-A", *rule)

    def close(self) -> None:
        """Stop the processes on all hosts, then remove the hosts."""
        for process in reversed(self._processes):
            stop(process)
        for host in self._hosts:
            remove(self.namespace(host))


def stop(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM, and SIGKILL to the whole group if the process does not end."""
    for file in (process.stdin, process.stdout):
        if file is not None:
            with suppress(OSError):
                file.close()
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait(STOP_S)


def remove(namespace: str) -> None:
    shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=30)


@contextmanager
def make_network() -> Iterator[Network]:
    """Create a network; skip the test where that is impossible; in CI missing tools are a failure."""
    require(*TOOLS)
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root: run the tests as root, or leave these to CI")
    probe = f"{PREFIX}{os.getpid()}-probe"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=30)
    remove(probe)
    if tried.returncode:
        pytest.skip(f"this kernel forbids network namespaces: {tried.stderr.strip()}")
    for line in run("ip", "netns", "list").splitlines():  # left by an interrupted run
        name = line.split()[0]
        owner = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            remove(name)
    network = Network()
    try:
        yield network
    finally:
        network.close()


def ip(*arguments: str) -> None:
    run("ip", *arguments)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
