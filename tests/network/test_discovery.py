"""Instances in DNS under load: hosts with separate addresses, a real DNS server, network faults."""

import pytest

from tests.network.conftest import Load, Proxy, Stage
from tests.waiting import wait_until

pytestmark = [pytest.mark.network, pytest.mark.slow]

ALL = ("llava-0", "llava-1", "llava-2")


def test_an_instance_goes_from_dns_and_comes_back(stage: Stage, proxy: Proxy, load: Load) -> None:
    """An instance that leaves DNS finishes its work and is removed; named again, it gets work. No client notices."""
    stage.name("llava-0", "llava-1")
    proxy.wait_for("llava-0", "llava-1")
    load.wait_answered(50)  # its answers are counted by now
    before = load.report()["by"]["llava-2"]
    load.wait_served("llava-0", "llava-1")
    assert load.report()["by"]["llava-2"] == before

    stage.name(*ALL)
    load.wait_served("llava-2")

    load.check()
    rows = proxy.look()["instances"]
    assert {(row["name"], row["source"]) for row in rows} == {(name, "_inference._tcp.llava.zone.test") for name in ALL}
    assert proxy.metric("DiscoveredInstances") == 3


def test_an_answer_that_flaps_moves_nobody(stage: Stage, proxy: Proxy, load: Load) -> None:
    """An instance that is missing from some answers stays, or leaves and is recalled; nothing is lost."""
    for _ in range(4):
        stage.name("llava-0", "llava-1")
        load.wait_answered(20)
        stage.name(*ALL)
        load.wait_answered(20)

    load.wait_served(*ALL)

    load.check()


def test_an_instance_that_falls_silent_is_found_and_its_work_done_elsewhere(
    stage: Stage, proxy: Proxy, load: Load
) -> None:
    """An instance that loses its network, without a reset, loses only its streams.

    It stays known and comes back by itself.
    """
    stage.network.cut_off("llava-1")
    wait_until(lambda: proxy.states()["llava-1"] == "down", "its silence is noticed", interval_s=0.1)
    load.wait_served("llava-0", "llava-2")
    load.check(may_break=True)
    assert proxy.look()["discovery"][0]["listed"] == 3

    stage.network.heal("llava-1")
    load.wait_served("llava-1")

    load.check(may_break=True)


def test_an_instance_that_refuses_is_left_at_once(stage: Stage, proxy: Proxy, load: Load) -> None:
    """An instance behind a firewall that answers with resets is left at once."""
    stage.network.reject("llava-2")
    wait_until(lambda: proxy.states()["llava-2"] == "down", "it is left", interval_s=0.1)
    load.wait_served("llava-0", "llava-1")
    stage.network.heal("llava-2")
    load.wait_served("llava-2")

    load.check(may_break=True)


def test_lost_packets_cost_time_alone(stage: Stage, proxy: Proxy, load: Load) -> None:
    """If a tenth of the packets to two instances is lost, requests only take longer.

    Streams may break when many probes are lost by chance.
    """
    for name in ALL[:2]:
        stage.network.lose(name, 0.1)
    load.wait_served(*ALL, turns=100)

    load.check(may_break=True)


def test_without_dns_the_last_known_stay(stage: Stage, proxy: Proxy, load: Load) -> None:
    """While the DNS server is down the known instances stay.

    The failure is logged once, counted, and shown with the last answer's age.
    """
    failures = proxy.metric("DiscoveryFailures_total")
    stage.zone.stop()
    wait_until(lambda: proxy.metric("DiscoveryFailures_total") >= failures + 3, "questions fail", interval_s=0.1)
    (entry,) = proxy.look()["discovery"]
    load.wait_served(*ALL)
    log = proxy.log.read_text()
    assert log.count("discovery failed, known") == log.count("discovery recovered") + 1
    assert entry["error"]
    assert entry["answer_age_s"] > 0

    stage.name("llava-0", "llava-1")
    proxy.wait_for("llava-0", "llava-1")

    load.check()


def test_an_instance_whose_address_changes_keeps_its_name(stage: Stage, proxy: Proxy, load: Load) -> None:
    """An instance at a new address, such as a recreated pod, gets the next turns, and none fails."""
    address = stage.network.add("elsewhere", 31)
    started = stage.start_instance("elsewhere", "llava-1")
    assert started.stdout.readline() == "ready\n"

    stage.name(*ALL, llava_1=address)
    wait_until(lambda: proxy.hosts().get("llava-1") == address, "it is known at its new address", interval_s=0.1)
    load.wait_served("llava-1")

    load.check()


def test_a_proxy_that_loses_its_network_goes_on_when_it_is_back(stage: Stage, proxy: Proxy, load: Load) -> None:
    """Requests fail while the proxy has no network, in which instances and DNS are silent; no session is lost."""
    stage.network.cut_off("proxy")
    wait_until(lambda: set(proxy.states().values()) == {"down"}, "it reaches no instance", interval_s=0.1)
    assert set(proxy.states()) == set(ALL)
    stage.network.heal("proxy")
    load.wait_served(*ALL)

    assert load.wrong("lost") == []
