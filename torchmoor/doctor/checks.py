"""The table of checks, in the order in which a user would fix their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torchmoor.doctor import clock, fleet, machine, services, software
from torchmoor.doctor.finding import Finding, FleetPlan, problem

Check = Callable[[FleetPlan], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    fleet.check_ports,
    software.check_java,
    software.check_packages,
    software.check_torch,
    machine.check_memory,
    machine.check_disk,
    machine.check_shared_memory,
    machine.check_open_files,
    machine.check_processors,
    machine.check_run_folder,
    machine.check_archives,
    services.check_journal,
    services.check_asynchronous,
    fleet.check_named_instances,
    fleet.check_discovery,
    fleet.check_fleet,
    clock.check_fleet_clock,
)


def examine(plan: FleetPlan) -> Iterator[Finding]:
    """Yield each finding as soon as it is known. A check that raises is reported as a problem."""
    for check in CHECKS:
        try:
            yield from check(plan)
        except Exception as error:  # a check that fails must not hide the others' findings
            name = check.__name__.removeprefix("check_").replace("_", " ")
            yield problem(name, f"the check itself failed: {error!r}", "report it, with this line")
