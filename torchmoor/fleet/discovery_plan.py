"""Decides without I/O what a DNS answer changes.

    listed, unknown                    joins
    listed, at its known address       stays; a drain by an earlier answer ends
    listed, at another address         is replaced: the old process is drained, then the new one joins
    missing from one answer            stays: DNS servers may learn of a change one after the other
    missing from two answers in a row  is drained and removed
    empty answer                       serving instances stay, as nothing could replace them; the others are drained

A target whose addresses could not be resolved counts as listed and stays. Of several addresses an instance uses the
first, or the known one; if it does not serve there, the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchmoor.wire.session_ids import is_instance_name

ABSENCES_BEFORE_DRAINING = 2


@dataclass(frozen=True, slots=True)
class InstanceAddress:
    """Address at which an instance listens for invocations."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class DnsTarget:
    """An instance in a DNS answer. hosts: its addresses, the first preferred; empty if unknown."""

    name: str
    port: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KnownInstance:
    """A registered instance from this DNS name.

    is_serving: its probes succeed. successor: address of the instance that will replace it, if any.
    """

    address: InstanceAddress
    is_serving: bool = True
    is_draining: bool = False
    successor: InstanceAddress | None = None


@dataclass(slots=True)
class DiscoveryPlan:
    """Changes to make. notes: what was ignored, and why. absences: input for the next answer's plan."""

    join: dict[str, InstanceAddress] = field(default_factory=dict)
    replace: dict[str, InstanceAddress] = field(default_factory=dict)
    keep: list[str] = field(default_factory=list)
    drain: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    absences: dict[str, int] = field(default_factory=dict)

    @property
    def is_settled(self) -> bool:
        """Return whether no instance is missing for the first time; if one is, the next query must come soon."""
        return all(count >= ABSENCES_BEFORE_DRAINING for count in self.absences.values())


def make_plan(
    targets: Sequence[DnsTarget],
    known: Mapping[str, KnownInstance],
    absences: Mapping[str, int],
    *,
    is_taken: Callable[[str], bool],
    max_instances: int,
) -> DiscoveryPlan:
    """Compare an answer with the known instances. is_taken: whether another source already uses a name."""
    plan = DiscoveryPlan()
    named = _select(targets, known, is_taken, max_instances, plan.notes)
    for target in named.values():
        _plan_target(target, known.get(target.name), plan)
    for name, instance in known.items():
        if name not in named:
            count = plan.absences[name] = min(absences.get(name, 0) + 1, ABSENCES_BEFORE_DRAINING)
            is_gone = count == ABSENCES_BEFORE_DRAINING and (bool(targets) or not instance.is_serving)
            if is_gone and (not instance.is_draining or instance.successor is not None):
                plan.drain.append(name)
    if not targets and known:
        plan.notes.append("the answer names no instance: serving instances stay")
    return plan


def _select(
    targets: Sequence[DnsTarget],
    known: Mapping[str, KnownInstance],
    is_taken: Callable[[str], bool],
    max_instances: int,
    notes: list[str],
) -> dict[str, DnsTarget]:
    """Return the targets that can be instances, by name; at most max_instances, known ones first."""
    found: dict[str, DnsTarget] = {}
    for target in sorted(targets, key=lambda each: (each.name not in known, each.name, each.port, each.hosts)):
        if not is_instance_name(target.name):
            notes.append(f"{target.name!r} cannot be an instance's name")
        elif target.name in found:
            notes.append(f"{target.name} is listed twice")
        elif not 0 < target.port < 65_536:
            notes.append(f"{target.name} has port {target.port}")
        elif is_taken(target.name):
            notes.append(f"{target.name} is already an instance from another source")
        elif len(found) == max_instances:
            notes.append(f"more than max_instances ({max_instances}) are listed")
            break
        else:
            found[target.name] = target
    return found


def _plan_target(target: DnsTarget, known: KnownInstance | None, plan: DiscoveryPlan) -> None:
    """Add to the plan what a listed target requires."""
    if not target.hosts:
        if known is None:
            plan.notes.append(f"{target.name} has no address")
        elif known.is_draining and known.successor is None:
            plan.keep.append(target.name)
        return
    if known is None:
        plan.join[target.name] = InstanceAddress(target.hosts[0], target.port)
    elif known.successor is not None and _is_at(target, known.successor):
        return  # possibly at the same address, with other settings
    elif _is_at(target, known.address) and (known.is_serving or len(target.hosts) == 1):
        if known.is_draining:
            plan.keep.append(target.name)
    else:
        plan.replace[target.name] = InstanceAddress(_next_host(target.hosts, known.address.host), target.port)


def _is_at(target: DnsTarget, address: InstanceAddress) -> bool:
    return address.port == target.port and address.host in target.hosts


def _next_host(hosts: Sequence[str], host: str) -> str:
    """Return the host after this one, or the first."""
    return hosts[(hosts.index(host) + 1) % len(hosts)] if host in hosts else hosts[0]
