"""Provide the parts of a cluster that podman lacks: DNS names, probes, and pod deletion.

Pods are real ones, each with its own address on a bridge. DNS is dnsmasq, with the records that a cluster creates for
ready pods. The kubelet's part follows the manifests: `wait_ready` probes; `delete` waits as preStop says, sends
SIGTERM, and kills after the grace period.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import requests
import yaml

from tests.kubernetes.engine import LastingPodman
from tests.kubernetes.manifests import NAMESPACE, Overlay, Workload
from tests.kubernetes.pod_spec import make_pod, secrets_of_environment, volumes_of
from tests.waiting import wait_until

DOMAIN = f"{NAMESPACE}.svc.cluster.local"
LOCAL_TTL_S = 1
NETWORK = "torchmoor-test-pods"
PODS = ("valkey-0", "llava-0", "llava-1", "torchmoor-0")


@dataclass
class Pod:
    """A started pod."""

    name: str
    workload: Workload
    address: str
    is_published: bool = False

    @property
    def probe(self) -> Mapping[str, Any]:
        return self.workload.containers[0]["readinessProbe"]

    @property
    def container(self) -> str:
        """Return podman's name of the container."""
        return f"{self.name}-{self.workload.containers[0]['name']}"

    def port(self, name: str) -> int:
        ports = {each["name"]: each["containerPort"] for each in self.workload.containers[0]["ports"]}
        return int(ports[name])

    def url(self, port: str) -> str:
        return f"http://{self.address}:{self.port(port)}"


class Cluster:
    """A cluster that exists while its context does."""

    def __init__(self, overlay: Overlay, engine: LastingPodman, folder: Path) -> None:
        self.overlay = overlay
        self.pods: dict[str, Pod] = {}
        self._engine = engine
        self._folder = folder
        self._bridge = ""
        self._dns_addresses: list[str] = []
        self._dns: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        self._clear()
        self._podman("network", "create", "--disable-dns", NETWORK)
        (described,) = json.loads(self._podman("network", "inspect", NETWORK))
        self._bridge = described["network_interface"]
        subnet = ipaddress.ip_network(described["subnets"][0]["subnet"])
        self._dns_addresses = [described["subnets"][0]["gateway"], str(subnet[-2])]
        for name, text in secrets_of_environment(self.overlay):
            path = self._folder / name
            path.write_text(text)
            self._podman("secret", "create", name, str(path))
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._dns.values():
            server.kill()
            server.wait(timeout=60)
        self._clear()

    def _clear(self) -> None:
        """Remove objects of these names, including those of an interrupted run."""
        for pod in PODS:
            self._engine.run("podman", "pod", "rm", "--force", "--time", "0", pod, is_checked=False)
        secrets = [name for name, _ in secrets_of_environment(self.overlay)]
        self._engine.run("podman", "secret", "rm", *secrets, is_checked=False)
        for volume in volumes_of(self.overlay, PODS):
            self._engine.run("podman", "volume", "rm", "--force", volume, is_checked=False)
        self._engine.run("podman", "network", "rm", "--force", NETWORK, is_checked=False)

    # Operations of kubectl

    def start(self, workload: str, number: int = 0) -> Pod:
        """Start one of a workload's pods and return when its processes run. Probes start with wait_ready."""
        template = self.overlay.workload(workload)
        name = f"{workload}-{number}"
        objects = make_pod(self.overlay, template, name, self._dns_addresses, self._folder / "secrets")
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump_all(objects))
        self._podman("play", "kube", "--network", NETWORK, "--no-hosts", str(path))
        pod = self.pods[name] = Pod(name, template, self._find_address(name))
        return pod

    def wait_ready(self, name: str) -> Pod:
        """Wait for the readiness probe, at most as long as the startup probe allows; then publish the pod's names."""
        pod = self.pods[name]
        startup = pod.workload.containers[0]["startupProbe"]
        patience_s = startup["periodSeconds"] * startup["failureThreshold"]
        wait_until(
            lambda: self.is_ready(pod) or self._fail_if_ended(pod),
            f"{name} is ready",
            deadline_s=patience_s,
            interval_s=0.25,
        )
        pod.is_published = True
        self.publish()
        return pod

    def is_ready(self, pod: Pod) -> bool:
        """Run the readiness probe once."""
        probe = pod.probe
        if "exec" in probe:
            return self._is_valkey_ready(pod)
        get = probe["httpGet"]
        try:
            url = pod.url(get["port"]) + get["path"]
            return requests.get(url, timeout=probe["timeoutSeconds"]).status_code == 200
        except requests.RequestException:
            return False

    def kill(self, name: str) -> None:
        """Kill a pod without notice, as when its node fails; DNS follows a little later."""
        pod = self.pods.pop(name)
        self._podman("kill", "--signal", "KILL", pod.container)
        self._podman("pod", "rm", "--force", "--time", "0", name)
        self.publish()

    def delete(self, name: str) -> tuple[int, float]:
        """Delete a pod gracefully. Return its exit code and how many seconds of the grace period it used."""
        pod = self.pods[name]
        pod.is_published = False
        self.publish()
        began = time.monotonic()
        container = pod.workload.containers[0]
        time.sleep(container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
        left_s = pod.workload.pod["terminationGracePeriodSeconds"] - (time.monotonic() - began)
        self._podman("stop", "--time", str(int(left_s)), pod.container, timeout_s=left_s + 30)
        took_s = time.monotonic() - began
        code = int(self._podman("inspect", "--format", "{{.State.ExitCode}}", pod.container))
        self._podman("pod", "rm", "--force", "--time", "0", name)
        del self.pods[name]
        return code, took_s

    def logs(self, name: str) -> str:
        """Return the container's log."""
        return self._podman("logs", self.pods[name].container)

    def _is_valkey_ready(self, pod: Pod) -> bool:
        """Check Valkey from here: the image has no client. test_secrets.py runs the probe's own command."""
        server = redis.Redis(
            host=pod.address, port=pod.port("valkey"), username="probe", password="probe", protocol=2, retry=None
        )
        try:
            with server:
                return bool(server.execute_command("PING"))
        except redis.RedisError:
            return False

    # The cluster's DNS

    def publish(self) -> None:
        """Publish the records of all ready pods.

        dnsmasq reads its records once, so it is restarted; there are two, as in a cluster, and one of them always
        answers.
        """
        lines = ["no-resolv", "no-hosts", "keep-in-foreground", "log-facility=-", "pid-file="]
        lines += ["bind-interfaces", "port=53", f"local-ttl={LOCAL_TTL_S}", "local=/cluster.local/"]
        for pod in self.pods.values():
            service = pod.workload.spec.get("serviceName")
            if pod.is_published and service:
                host = f"{pod.name}.{service}.{DOMAIN}"
                lines += [f"host-record={host},{pod.address}", f"host-record={service}.{DOMAIN},{pod.address}"]
                for port in self.overlay.get("Service", service)["spec"]["ports"]:
                    lines.append(f"srv-host=_{port['name']}._tcp.{service}.{DOMAIN},{host},{port['port']}")
        path = self._folder / "dnsmasq.conf"
        path.write_text("\n".join(lines) + "\n")
        for address in self._dns_addresses:
            self._serve_names(address, path)

    def _serve_names(self, address: str, records: Path) -> None:
        """Start a DNS server and return when it listens."""
        if (old := self._dns.pop(address, None)) is not None:
            old.terminate()
            old.wait(timeout=60)
        elif address != self._dns_addresses[0]:  # the gateway has this address
            add = ("ip", "address", "replace", f"{address}/32", "dev", self._bridge)
            subprocess.run(add, check=True, timeout=30)
        with (self._folder / "dnsmasq.log").open("ab") as log:
            words = ("dnsmasq", f"--conf-file={records}", f"--listen-address={address}")
            self._dns[address] = subprocess.Popen(words, stdout=log, stderr=log)
        wait_until(lambda: _listens(address), f"the DNS server at {address} listens")

    def _podman(self, *arguments: str, timeout_s: float = 120) -> str:
        return self._engine.run("podman", *arguments, timeout_s=timeout_s)

    def _find_address(self, name: str) -> str:
        infra = json.loads(self._podman("pod", "inspect", name))["InfraContainerID"]
        networks = json.loads(self._podman("inspect", infra))[0]["NetworkSettings"]["Networks"]
        address: str = networks[NETWORK]["IPAddress"]
        assert address, f"{name} has no address"
        return address

    def _fail_if_ended(self, pod: Pod) -> bool:
        state = self._podman("inspect", "--format", "{{.State.Status}}", pod.container).strip()
        assert state == "running", f"{pod.name} is {state}:\n{self.logs(pod.name)[-3000:]}"
        return False


def _listens(address: str) -> bool:
    with suppress(OSError), socket.create_connection((address, 53), timeout=5):
        return True
    return False
