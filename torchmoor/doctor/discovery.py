"""Check of the DNS names that a configuration file takes instances from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from torchmoor.doctor.finding import Finding, FleetPlan, ok, problem, warning
from torchmoor.errors import DiscoveryError

MAX_SHOWN = 5


def check_discovery(plan: FleetPlan) -> Iterator[Finding]:
    """Query each entry of the group Discovery."""
    if plan.configuration is None or not plan.configuration.discovery:
        return
    from torchmoor.fleet.discovery_dns import ask  # needs dnspython

    for entry in plan.configuration.discovery:
        asked = f"{entry.dns_name} ({entry.record})"
        try:
            answer = asyncio.run(ask(entry))
        except DiscoveryError as error:
            remedy = "look at the network's DNS, or set nameservers in the entry"
            yield problem("discovery", f"no answer: {error}", remedy)
            continue
        lost = [target.name for target in answer.targets if not target.hosts]
        if lost:
            found = f"{asked} names {', '.join(lost[:MAX_SHOWN])}, of which DNS knows no address"
            yield warning(
                "discovery", found, "in Kubernetes: a headless Service named by the StatefulSet's serviceName"
            )
        if answer.targets or answer.hosts:
            yield ok("discovery", f"{asked} names {len(answer.targets) or len(answer.hosts)} instances")
        else:
            remedy = "correct dns_name and record, unless there is no instance yet"
            yield warning("discovery", f"{asked} has no records", remedy)
