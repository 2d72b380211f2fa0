"""A file's Discovery: a DNS server on loopback that answers, has no records, or is not there."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.torchmoor.doctor.conftest import MakePlan
from tests.unit.torchmoor.fleet.dns_server import Behaviour, answering, serving
from torchmoor.config.discovery import DiscoverySettings
from torchmoor.doctor.finding import Finding, Level
from torchmoor.doctor.fleet import check_discovery

NAME = "_inference._tcp.llava.zone.test"
SRV = f"{NAME}. 30 SRV 0 0 8085 llava-0.zone.test."


def examine(make_plan: MakePlan, server: str, **changes: Any) -> list[Finding]:
    values = {"dns_name": NAME, "timeout_s": 5.0, "nameservers": (server,), **changes}
    configuration = SimpleNamespace(discovery=(DiscoverySettings(**values),))
    return list(check_discovery(make_plan(configuration=configuration)))


def examine_beside(behave: Behaviour, make_plan: MakePlan) -> list[Finding]:
    async def run() -> list[Finding]:
        async with serving(behave) as server:
            return await asyncio.to_thread(examine, make_plan, server.address)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("records", "levels", "said"),
    [
        ((SRV, "llava-0.zone.test. 30 A 10.0.0.1"), [Level.OK], "names 1 instance"),
        ((SRV,), [Level.WARNING, Level.OK], "llava-0, of which DNS knows no address"),
        ((), [Level.WARNING], "has no records"),
    ],
)
def test_what_dns_says_is_told(make_plan: MakePlan, records: tuple[str, ...], levels: list[Level], said: str) -> None:
    """The findings cover an instance, a name without an address, and no instance."""
    found = examine_beside(answering(*records), make_plan)

    assert [finding.level for finding in found] == levels
    assert said in found[0].found


def test_a_server_that_is_not_there_is_a_problem(make_plan: MakePlan) -> None:
    """A DNS server that does not answer is a problem, and the finding has the name in question."""
    [finding] = examine(make_plan, "127.0.0.1:9", timeout_s=0.5)

    assert finding.level is Level.PROBLEM
    assert NAME in finding.found


def test_without_discovery_there_is_nothing_to_say(make_plan: MakePlan) -> None:
    """Without Discovery, as with `torchmoor up`, there is no finding."""
    assert list(check_discovery(make_plan())) == []
