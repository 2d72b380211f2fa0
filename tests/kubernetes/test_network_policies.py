"""Check who may connect to whom, by the policies of each overlay and the API's rules for them."""

import pytest

from tests.kubernetes.manifests import Overlay
from tests.kubernetes.network_rules import Peer, Rules

INFERENCE, SIDE, RUNTIME, ADMIN, VALKEY = 8085, 8086, 8080, 9080, 6379
MANAGEMENT = (8081, 7070, 7071)  # TorchServe's own ports: on loopback, and closed to the network as well
DNS_SERVER = Peer({"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"})
STRANGER = Peer({"app": "anything"}, {"kubernetes.io/metadata.name": "elsewhere"})
PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"})


@pytest.fixture
def rules(overlay: Overlay) -> Rules:
    return Rules(overlay.of("NetworkPolicy"))


@pytest.fixture
def proxy(overlay: Overlay) -> Peer:
    return Peer(overlay.workload("torchmoor").labels)


@pytest.fixture
def instance(overlay: Overlay) -> Peer:
    return Peer(overlay.workload("llava").labels)


@pytest.fixture
def valkey(overlay: Overlay) -> Peer:
    return Peer(overlay.workload("valkey").labels)


def test_only_proxies_reach_instances(rules: Rules, proxy: Peer, instance: Peer, valkey: Peer) -> None:
    """Proxies reach the inference and probe ports of instances; other instances do not."""
    for port in (INFERENCE, SIDE):
        assert rules.allow(proxy, instance, port)
        for other in (instance, valkey, STRANGER, Peer({"app": "anything"})):
            assert not rules.allow(other, instance, port)
    for port in MANAGEMENT:
        assert not rules.allow(proxy, instance, port)


def test_only_instances_and_proxies_reach_valkey(rules: Rules, proxy: Peer, instance: Peer, valkey: Peer) -> None:
    """Instances and proxies reach Valkey, and Valkey opens no connections, DNS included."""
    assert rules.allow(proxy, valkey, VALKEY)
    assert rules.allow(instance, valkey, VALKEY)
    for other in (STRANGER, PROMETHEUS, Peer({"app": "anything"})):
        assert not rules.allow(other, valkey, VALKEY)
    for other in (proxy, instance, DNS_SERVER, Peer(address="93.184.216.34")):
        for port in (53, 443, VALKEY, INFERENCE, RUNTIME):
            assert not rules.allow(valkey, other, port)


def test_who_asks_for_names_is_answered(rules: Rules, proxy: Peer, instance: Peer) -> None:
    """DNS is allowed by UDP, by TCP for long answers, and through the node's cache."""
    for pod in (proxy, instance):
        for protocol in ("UDP", "TCP"):
            assert rules.allow(pod, DNS_SERVER, 53, protocol)
            assert rules.allow(pod, Peer(address="169.254.20.10"), 53, protocol)
        assert not rules.allow(pod, DNS_SERVER, 8080)


def test_clients_are_of_this_namespace_or_of_one_with_the_label(rules: Rules, proxy: Peer) -> None:
    """Clients reach the runtime API only; Prometheus alone reaches the admin plane."""
    friend = Peer({"app": "anything"}, {"kubernetes.io/metadata.name": "elsewhere", "torchmoor-clients": "allowed"})
    for client in (friend, Peer({"job": "batch"})):
        assert not rules.allow(client, proxy, ADMIN)
    assert rules.allow(friend, proxy, RUNTIME)
    assert not rules.allow(STRANGER, proxy, RUNTIME)
    assert not rules.allow(STRANGER, proxy, ADMIN)


def test_a_pod_of_this_namespace_has_to_be_let_out(rules: Rules, proxy: Peer) -> None:
    """Egress is denied by default: a client in this namespace needs an egress policy of its own."""
    assert not rules.allow(Peer({"job": "batch"}), proxy, RUNTIME)


@pytest.mark.parametrize("overlay", ["gpu", "gpu-hpa"], indirect=True)
def test_prometheus_and_the_ingress_are_let_in(rules: Rules, proxy: Peer, instance: Peer) -> None:
    """Prometheus and the ingress reach one port each."""
    ingress = Peer({"app": "controller"}, {"kubernetes.io/metadata.name": "ingress-nginx"})
    assert rules.allow(PROMETHEUS, proxy, ADMIN)
    assert rules.allow(PROMETHEUS, instance, SIDE)
    assert not rules.allow(PROMETHEUS, instance, INFERENCE)
    assert rules.allow(ingress, proxy, RUNTIME)
    assert not rules.allow(ingress, proxy, ADMIN)
    assert not rules.allow(ingress, instance, INFERENCE)


@pytest.mark.parametrize("overlay", ["gpu", "gpu-hpa"], indirect=True)
def test_the_internet_is_reached_and_nothing_private(rules: Rules, proxy: Peer, instance: Peer, valkey: Peer) -> None:
    """An image's URL from a client cannot reach the cluster's machines or a cloud's metadata service."""
    public = ("93.184.216.34", "2606:4700::1111")
    private = ("10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.20.0.1", "192.168.1.1", "fd00::1", "::1")
    for pod in (proxy, instance):
        assert all(rules.allow(pod, Peer(address=address), 443) for address in public)
        assert not any(rules.allow(pod, Peer(address=address), 443) for address in private)
        assert not rules.allow(pod, Peer(address=public[0]), 25)
    assert not rules.allow(valkey, Peer(address=public[0]), 443)


@pytest.mark.parametrize("overlay", ["demo"], indirect=True)
def test_the_demo_reaches_nothing_outside(rules: Rules, proxy: Peer, instance: Peer) -> None:
    """The demo opens no outside connections: its model is in the image, and pictures come in requests."""
    for pod in (proxy, instance):
        assert not rules.allow(pod, Peer(address="93.184.216.34"), 443)
