"""Checks of the ports, of a running fleet, and of the instances that a configuration file lists or finds by DNS."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from torchmoor.clients.admin import AdminClient
from torchmoor.clients.errors import AdminError, AdminRefused, AdminUnreachable, AdminUntrusted
from torchmoor.doctor.finding import Finding, FleetPlan, Level, counted, expect, ok, problem, warning
from torchmoor.errors import DiscoveryError

TIMEOUT_S = 3.0
MAX_SHOWN = 20


def is_running(plan: FleetPlan) -> bool:
    """Return whether an admin plane answers, and not another program's server."""
    try:
        return AdminClient(plan.admin_url, plan.admin_token).get("/livez")["ok"] is True
    except AdminUntrusted:  # check_fleet reports it
        return True
    except AdminError:
        return False


def check_ports(plan: FleetPlan) -> Iterator[Finding]:
    """Check that the proxy's ports are free, or held by the fleet that runs."""
    listen = plan.listen
    if is_running(plan) and urlsplit(plan.admin_url).port == listen.admin_port:
        yield ok("ports", f"in use by the fleet that runs at {plan.admin_url}")
        return
    places = ((listen.host, listen.port, "--port"), (listen.admin_host, listen.admin_port, "--admin-port"))
    for host, port, option in places:
        try:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                remedy = f"give another {option}, or find who has it: ss -ltnp 'sport = :{port}'"
                yield problem("ports", f"{host}:{port} is in use", remedy)
            else:
                found = f"{host}:{port} cannot be used: {error.strerror}"
                yield problem("ports", found, f"give another {option} or host")
        else:
            yield ok("ports", f"{host}:{port} is free" if port else f"{host}: any free port will be used")


def check_fleet(plan: FleetPlan) -> Iterator[Finding]:
    """Check that every instance of a running fleet is ready."""
    try:
        answer = AdminClient(plan.admin_url, plan.admin_token).get("/instances")
        rows, variants = answer["instances"], answer["autoscaling"]
    except AdminUntrusted as error:
        yield problem("fleet", str(error), "set SSL_CERT_FILE to the file of listen.admin_tls_certificate")
        return
    except AdminUnreachable as error:
        if plan.is_admin_named:
            yield problem("fleet", str(error), "start it, or correct --admin-url")
        else:
            yield ok("fleet", f"none runs at {plan.admin_url}")
        return
    except AdminError as error:
        remedy = "give the port of its admin plane with --admin-url"
        if isinstance(error, AdminRefused):
            remedy = "set TORCHMOOR_ADMIN_TOKEN, or give --keys FILE"
        yield problem("fleet", str(error), remedy)
        return
    if not rows and any(variant["min_capacity"] == 0 for variant in variants):
        yield ok("fleet", f"no instance runs at {plan.admin_url}; the next request starts one")
        return
    yield from _check_instances(rows, plan.admin_url)


def _check_instances(rows: Sequence[Mapping[str, Any]], admin_url: str) -> Iterator[Finding]:
    """Check the instances' states and breakers. rows: as the admin plane lists them."""
    late = [row for row in rows if row["state"] != "ready"]
    for row in late[:MAX_SHOWN]:
        remedy = f"torchmoor undrain {row['name']}" if row["is_drained"] else "look at its log in the run directory"
        yield warning("fleet", f"instance {row['name']} is {row['state']}", remedy)
    for row in [row for row in rows if row["breaker"] != "closed"][:MAX_SHOWN]:
        found = f"instance {row['name']} fails its requests ({row['failures_in_a_row']} in a row)"
        yield warning("fleet", found, "look at its log")
    ready = f"{len(rows) - len(late)} of {counted(len(rows), 'instance')} ready at {admin_url}"
    yield expect(len(late) < len(rows), "fleet", ready, "torchmoor instances shows their states")


def check_named_instances(plan: FleetPlan) -> Iterator[Finding]:
    """Check that the listed instances' names resolve, and that their ports are open."""
    for instance in plan.configuration.instances[:MAX_SHOWN] if plan.configuration else ():
        place = f"{instance.name} at {instance.host}:{instance.port}"
        try:
            socket.create_connection((instance.host, instance.port), timeout=TIMEOUT_S).close()
        except socket.gaierror as error:
            found = f"{place}: the name does not resolve ({error.strerror})"
            yield problem("instances", found, "correct Instances, or DNS")
        except OSError as error:
            yield warning("instances", f"{place} does not answer: {error.strerror or error}", "start it; it joins then")
        else:
            yield ok("instances", f"{place} answers")


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
            remedy = "in Kubernetes: a headless Service named by the StatefulSet's serviceName"
            yield warning("discovery", found, remedy)
        number = len(answer.targets) or len(answer.hosts)
        found = f"{asked} names {counted(number, 'instance')}" if number else f"{asked} has no records"
        remedy = "correct dns_name and record, unless there is no instance yet"
        yield expect(number > 0, "discovery", found, remedy, Level.WARNING)
