"""The table of checks, in the order in which a user would fix their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from torchmoor.doctor import discovery, fleet, listeners, machine, services, software
from torchmoor.doctor.finding import Finding, FleetPlan, ok, problem

Check = Callable[[FleetPlan], Iterator[Finding]]
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


def examine(plan: FleetPlan) -> Iterator[Finding]:
    """Yield each finding as soon as it is known. A check that raises is reported as a problem."""
    yield from _safely(_check_ports, plan)
    for check in CHECKS:
        yield from _safely(check, plan)


def _check_ports(plan: FleetPlan) -> Iterator[Finding]:
    """Check the ports; those held by the running fleet are expected."""
    if fleet.is_running(plan) and urlsplit(plan.admin_url).port == plan.admin_port:
        yield ok("ports", f"in use by the fleet that runs at {plan.admin_url}")
    else:
        yield from listeners.check_ports(plan)


def _safely(check: Check, plan: FleetPlan) -> Iterator[Finding]:
    try:
        yield from check(plan)
    except Exception as error:  # one broken check must not hide the others' findings
        name = check.__name__.removeprefix("_").removeprefix("check_").replace("_", " ")
        yield problem(name, f"the check itself failed: {error!r}", "report it, with this line")
