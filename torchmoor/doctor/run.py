"""All checks, in the order in which a person would mend what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from torchmoor.doctor import discovery, fleet, listeners, machine, services, software
from torchmoor.doctor.finding import Finding, Patient, ok, problem

Check = Callable[[Patient], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    software.check_java,
    software.check_packages,
    software.check_torch,
    machine.check_memory,
    machine.check_disk,
    machine.check_shared_memory,
    machine.check_open_files,
    machine.check_processors,
    listeners.check_run_folder,
    listeners.check_archives,
    services.check_journal,
    services.check_asynchronous,
    fleet.check_named_instances,
    discovery.check_discovery,
    fleet.check_fleet,
    fleet.check_fleet_clock,
)


def examine(patient: Patient) -> Iterator[Finding]:
    """Every finding as soon as it is there. A check that fails itself is a finding, too."""
    yield from _safely(_check_ports, patient)
    for check in CHECKS:
        yield from _safely(check, patient)


def _check_ports(patient: Patient) -> Iterator[Finding]:
    """That the fleet itself has its ports is as it should be."""
    if fleet.is_running(patient) and urlsplit(patient.admin_url).port == patient.admin_port:
        yield ok("ports", f"in use by the fleet that runs at {patient.admin_url}")
    else:
        yield from listeners.check_ports(patient)


def _safely(check: Check, patient: Patient) -> Iterator[Finding]:
    try:
        yield from check(patient)
    except Exception as error:  # one broken check must not hide what the others find
        name = check.__name__.removeprefix("_").removeprefix("check_").replace("_", " ")
        yield problem(name, f"the check itself failed: {error!r}", "tell us about it, with this line")
