"""Parsing of DNS answers, from a server on loopback."""

import asyncio
from types import SimpleNamespace
from typing import Any

import dns.message
import dns.name
import dns.rcode
import pytest

from tests.unit.torchmoor.fleet.dns_server import Behaviour, answering, failing, serving, truncating
from torchmoor.config.discovery import DiscoverySettings
from torchmoor.errors import DiscoveryError
from torchmoor.fleet import discovery_dns
from torchmoor.fleet.discovery_dns import DnsAnswer, ask
from torchmoor.fleet.discovery_plan import DnsTarget
from torchmoor.fleet.instance_names import name_of_address

NAME = "_inference._tcp.llava.zone.test"
SRV = (f"{NAME}. 30 SRV 0 0 8085 llava-0.zone.test.", f"{NAME}. 30 SRV 0 0 8086 LLAVA-1.zone.test.")
ADDRESSES = ("llava-0.zone.test. 30 A 10.0.0.1", "LLAVA-1.zone.test. 30 A 10.0.0.2")
BOTH = (DnsTarget("llava-0", 8085, ("10.0.0.1",)), DnsTarget("llava-1", 8086, ("10.0.0.2",)))


def answer_to(behave: Behaviour, **changes: Any) -> DnsAnswer:
    """Return the result of one question to a server with this behaviour."""

    async def run() -> DnsAnswer:
        async with serving(behave) as server:
            values = {"dns_name": NAME, "timeout_s": 60.0, "nameservers": (server.address,), **changes}
            return await ask(DiscoverySettings(**values))

    return asyncio.run(run())


def by_name(answer: DnsAnswer) -> tuple[DnsTarget, ...]:
    return tuple(sorted(answer.targets, key=lambda target: target.name))


def test_services_with_their_ports_and_addresses() -> None:
    """Names are converted to lower case; port, address and TTL are the record's."""
    answer = answer_to(answering(*SRV, *ADDRESSES))

    assert by_name(answer) == BOTH
    assert answer.ttl_s == 30


async def test_addresses_that_come_along_are_not_asked_for() -> None:
    """Addresses in additional records, which Kubernetes sends, are not asked for."""
    async with serving(answering(*SRV, additional=ADDRESSES)) as server:
        answer = await ask(DiscoverySettings(dns_name=NAME, nameservers=(server.address,)))

    assert by_name(answer) == BOTH
    assert server.num_asked == 1


async def test_each_target_has_its_turn_where_time_is_too_short_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a slow server leaves time for some targets only, each gets its turn in the following rounds."""
    monkeypatch.setattr(discovery_dns, "MAX_QUESTIONS", 1)
    names = {dns.name.from_text(f"llava-{number}.zone.test.") for number in range(5)}

    class SlowResolver:
        """Answers the first two questions of each round."""

        num_left = 0

        async def resolve(self, name: dns.name.Name, kind: Any, **options: Any) -> Any:
            if self.num_left == 0:
                await asyncio.Event().wait()
            self.num_left -= 1
            return SimpleNamespace(rrset=[SimpleNamespace(address="10.0.0.1")])

    resolver: Any = SlowResolver()
    found: set[str] = set()
    for _ in range(1000):
        resolver.num_left = 2
        found |= (await discovery_dns.find_hosts(resolver, names, 0.01)).keys()
        if len(found) == len(names):
            break

    assert found == {name.to_text() for name in names}


def test_a_truncated_answer_is_asked_for_over_tcp() -> None:
    """A truncated answer is repeated over TCP, for any number of instances."""
    records = [f"{NAME}. 30 SRV 0 0 8085 llava-{number}.zone.test." for number in range(300)]
    along = tuple(f"llava-{number}.zone.test. 30 A 10.0.1.{number % 250}" for number in range(300))

    answer = answer_to(truncating(answering(*records, additional=along)))

    assert len(answer.targets) == 300
    assert all(target.hosts for target in answer.targets)


def test_aliases_are_followed() -> None:
    """Aliases of the service's name and of targets are followed."""
    alias = f"{NAME}. 30 CNAME other.zone.test."
    service = "other.zone.test. 30 SRV 0 0 8085 llava-0.zone.test."
    target = "llava-0.zone.test. 30 CNAME host.zone.test."

    answer = answer_to(answering(alias, service, target, "host.zone.test. 30 A 10.0.0.9"))

    assert answer.targets == (DnsTarget("llava-0", 8085, ("10.0.0.9",)),)


def test_a_target_with_ipv6_alone() -> None:
    """IPv6 targets are accepted; several addresses of a target have the same order each time."""
    six = "llava-0.zone.test. 30 AAAA fd00::1"
    several = [f"LLAVA-1.zone.test. 30 A 10.0.0.{number}" for number in (3, 2)]

    answer = answer_to(answering(*SRV, six, *several))

    assert [target.hosts for target in by_name(answer)] == [("fd00::1",), ("10.0.0.2", "10.0.0.3")]


def test_a_target_without_an_address_is_named_all_the_same() -> None:
    """A target without an address is returned, so that its known instance stays (discovery_plan)."""
    answer = answer_to(answering(*SRV, ADDRESSES[0]))

    assert [target.hosts for target in by_name(answer)] == [("10.0.0.1",), ()]


@pytest.mark.parametrize(("record", "host"), [("A", "10.0.0.1"), ("AAAA", "fd00::1")])
def test_addresses_instead_of_services(record: str, host: str) -> None:
    """Address records are used if a zone has no SRV records."""
    answer = answer_to(answering(f"{NAME}. 5 {record} {host}"), record=record, port=8085)

    assert answer == DnsAnswer(hosts=(host,), ttl_s=5.0)


@pytest.mark.parametrize(
    "behave",
    [answering(), answering(f"{NAME}. 30 A 10.0.0.1"), answering(f"{NAME}. 30 SRV 0 0 0 .")],
    ids=["no such name", "no such record", "decidedly no service"],
)
def test_that_there_is_nobody_is_an_answer(behave: Behaviour) -> None:
    """An empty answer is a valid answer, unlike a missing one."""
    assert answer_to(behave).targets == ()


@pytest.mark.parametrize(
    "behave",
    [
        failing(dns.rcode.SERVFAIL),
        failing(dns.rcode.REFUSED),
        lambda query, is_tcp: None,
        lambda query, is_tcp: query.to_wire()[:2] + b"\x81\x80" + b"\xff" * 20,
        lambda query, is_tcp: dns.message.make_response(query).to_wire()[:-3],
    ],
    ids=["server failure", "refused", "silence", "garbage", "cut off"],
)
def test_no_answer_is_an_error_that_names_what_was_asked(behave: Behaviour) -> None:
    """Any invalid or missing answer is an error with the name in question."""
    with pytest.raises(DiscoveryError, match=NAME):
        answer_to(behave, timeout_s=0.3)


async def test_another_server_is_asked_if_one_is_silent() -> None:
    """If one server is silent another is asked within the same time-out."""
    async with serving(lambda query, is_tcp: None) as dead, serving(answering(*SRV, *ADDRESSES)) as server:
        servers = (dead.address, server.address)
        answer = await ask(DiscoverySettings(dns_name=NAME, nameservers=servers, timeout_s=3.0))

    assert len(answer.targets) == 2


def test_names_of_addresses() -> None:
    """Each address gives a different valid instance name."""
    assert name_of_address("10.0.0.5") == "ip-10-0-0-5"
    assert name_of_address("fd00::1") == "ip-fd00-0000-0000-0000-0000-0000-0000-0001"
