"""Whether DNS names instances, where a configuration file asks it for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from torchmoor.doctor.finding import Finding, Patient, ok, problem, warning
from torchmoor.errors import DiscoveryError

MAX_TOLD = 5


def check_discovery(patient: Patient) -> Iterator[Finding]:
    """One question for each entry of the file's group Discovery."""
    if patient.configuration is None or not patient.configuration.discovery:
        return
    from torchmoor.fleet.discovery_dns import ask  # dnspython, which nobody else here needs

    for entry in patient.configuration.discovery:
        asked = f"{entry.dns_name} ({entry.record})"
        try:
            answer = asyncio.run(ask(entry))
        except DiscoveryError as error:
            remedy = "look at the network's DNS, or set nameservers in the entry"
            yield problem("discovery", f"no answer: {error}", remedy)
            continue
        lost = [target.name for target in answer.targets if not target.hosts]
        if lost:
            found = f"{asked} names {', '.join(lost[:MAX_TOLD])}, of which DNS knows no address"
            yield warning(
                "discovery", found, "in Kubernetes: a headless Service named by the StatefulSet's serviceName"
            )
        if answer.targets or answer.hosts:
            yield ok("discovery", f"{asked} names {len(answer.targets) or len(answer.hosts)} instances")
        else:
            remedy = "correct dns_name and record, unless there shall be no instance yet"
            yield warning("discovery", f"{asked} names nobody", remedy)
