"""Checks of a running fleet, and of the instances that a configuration file lists."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from torchmoor.clients.admin import AdminClient
from torchmoor.clients.errors import AdminError, AdminRefused, AdminUnreachable
from torchmoor.doctor.finding import Finding, FleetPlan, ok, problem, warning
from torchmoor.doctor.services import check_clock

TIMEOUT_S = 3.0
MAX_SHOWN = 20


def is_running(plan: FleetPlan) -> bool:
    """Return whether an admin plane answers, with any status."""
    try:
        AdminClient(plan.admin_url, plan.admin_token).get("/healthz")
    except AdminUnreachable:
        return False
    except AdminError:
        return True
    return True


def check_fleet(plan: FleetPlan) -> Iterator[Finding]:
    """Check that every instance of a running fleet is ready."""
    try:
        rows = AdminClient(plan.admin_url, plan.admin_token).get("/instances")["instances"]
    except AdminUnreachable as error:
        if plan.is_admin_named:
            yield problem("fleet", str(error), "start it, or correct --admin-url")
        else:
            yield ok("fleet", f"none runs at {plan.admin_url}")
        return
    except AdminRefused as error:
        yield problem("fleet", str(error), "set TORCHMOOR_ADMIN_TOKEN, or give --keys FILE")
        return
    except AdminError as error:
        yield problem("fleet", str(error), "give the port of its admin plane with --admin-url")
        return
    late = [row for row in rows if row["state"] != "ready"]
    for row in late[:MAX_SHOWN]:
        remedy = f"torchmoor undrain {row['name']}" if row["is_drained"] else "look at its log in the run directory"
        yield warning("fleet", f"instance {row['name']} is {row['state']}", remedy)
    for row in [row for row in rows if row["breaker"] != "closed"][:MAX_SHOWN]:
        found = f"instance {row['name']} fails its requests ({row['failures_in_a_row']} in a row)"
        yield warning("fleet", found, "look at its log")
    if len(late) < len(rows):
        yield ok("fleet", f"{len(rows) - len(late)} of {len(rows)} instances are ready at {plan.admin_url}")
    else:
        yield problem("fleet", f"no instance is ready at {plan.admin_url}", "torchmoor instances shows their states")


def check_fleet_clock(plan: FleetPlan) -> Iterator[Finding]:
    """Compare the proxy's clock with this machine's, which signs the requests."""
    for url in (f"{plan.admin_url.rstrip('/')}/healthz", f"{plan.url.rstrip('/')}/ping"):
        try:
            with urlopen(url, timeout=TIMEOUT_S) as answer:
                date = answer.headers.get("Date")
        except HTTPError as error:
            with error:
                date = error.headers.get("Date")
        except (URLError, OSError, HTTPException, ValueError):
            continue
        if date is not None:
            yield from check_clock(date, url)
            return


def check_named_instances(plan: FleetPlan) -> Iterator[Finding]:
    """Check that the listed instances' names resolve, and that their ports are open."""
    if plan.configuration is None:
        return
    for instance in plan.configuration.instances[:MAX_SHOWN]:
        place = f"{instance.name} at {instance.host}:{instance.port}"
        try:
            with socket.create_connection((instance.host, instance.port), timeout=TIMEOUT_S):
                pass
        except socket.gaierror as error:
            yield problem(
                "instances", f"{place}: the name does not resolve ({error.strerror})", "correct Instances, or DNS"
            )
        except OSError as error:
            yield warning("instances", f"{place} does not answer: {error.strerror or error}", "start it; it joins then")
        else:
            yield ok("instances", f"{place} answers")
