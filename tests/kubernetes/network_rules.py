"""Evaluate NetworkPolicies together, by the rules of the API: which pods may connect to which."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

from tests.kubernetes.manifests import NAMESPACE


@dataclass(frozen=True, slots=True)
class Peer:
    """A pod, or with `address` a host outside the cluster."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: Mapping[str, str] = field(default_factory=lambda: {"kubernetes.io/metadata.name": NAMESPACE})
    address: str = ""


class Rules:
    """All policies of the namespace."""

    def __init__(self, policies: Iterable[Mapping[str, Any]]) -> None:
        self._specs = [policy["spec"] for policy in policies]

    def allow(self, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
        """Return whether the source may connect to the target: policies of both sides must allow it."""
        return self._agrees("Egress", source, target, port, protocol) and self._agrees(
            "Ingress", target, source, port, protocol
        )

    def _agrees(self, direction: str, own: Peer, other: Peer, port: int, protocol: str) -> bool:
        specs = list(self._of(direction, own))
        rules = [rule for spec in specs for rule in spec.get(direction.lower(), ())]
        return not specs or any(_matches(direction, rule, other, port, protocol) for rule in rules)

    def _of(self, direction: str, pod: Peer) -> Iterator[Mapping[str, Any]]:
        """Return the policies of a pod; pods of other namespaces and outside hosts have none."""
        if pod.address or not _is_own(pod):
            return
        for spec in self._specs:
            if direction in spec["policyTypes"] and _has(pod.labels, spec["podSelector"]):
                yield spec


def _is_own(pod: Peer) -> bool:
    return pod.namespace.get("kubernetes.io/metadata.name") == NAMESPACE


def _has(labels: Mapping[str, str], selector: Mapping[str, Any]) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _matches(direction: str, rule: Mapping[str, Any], other: Peer, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    if ports is not None and not any(each["port"] == port and each["protocol"] == protocol for each in ports):
        return False
    peers = rule.get("from" if direction == "Ingress" else "to")
    return peers is None or any(_is_peer(peer, other) for peer in peers)


def _is_peer(rule: Mapping[str, Any], other: Peer) -> bool:
    if "ipBlock" in rule:
        return bool(other.address) and _is_within(rule["ipBlock"], other.address)
    if other.address:
        return False
    if "namespaceSelector" in rule:
        return _has(other.namespace, rule["namespaceSelector"]) and _has(other.labels, rule.get("podSelector", {}))
    return _is_own(other) and _has(other.labels, rule["podSelector"])


def _is_within(block: Mapping[str, Any], address: str) -> bool:
    found = ip_address(address)
    return found in ip_network(block["cidr"]) and not any(found in ip_network(each) for each in block.get("except", ()))
