"""What an answer of DNS changes, decided without I/O.

    named, unknown                     joins
    named, known at a listed address   stays; if it was on its way out, it is called back
    named, known at another address    is replaced: the old process ends what it does, then the new one joins
    not named by one answer            stays: servers behind one address may know of a change one after the other
    not named by two in a row          leaves: ends what it does and is forgotten
    nobody is named at all             those that serve stay, the others leave: there is nobody else for the work

A target whose addresses could not be found is named: it stays as it is known. An instance with several addresses has
its first, or the one that it is known at, unless it does not serve there: then the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchmoor.config.instances import INSTANCE_NAME

ABSENCES_BEFORE_LEAVING = 2


@dataclass(frozen=True, slots=True)
class InstanceAddress:
    """Where an instance listens for invocations."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class DnsTarget:
    """An instance as an answer names it. hosts: its addresses, the first preferred; none if they are not known."""

    name: str
    port: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KnownInstance:
    """An instance that this name has brought.

    is_serving: its probes are good. successor: where the one is that comes in its place, if one does.
    """

    place: InstanceAddress
    is_serving: bool = True
    is_draining: bool = False
    successor: InstanceAddress | None = None


@dataclass(slots=True)
class DiscoveryPlan:
    """What is to be done. notes: what could not be used, and why. absences: to be given back with the next answer."""

    join: dict[str, InstanceAddress] = field(default_factory=dict)
    replace: dict[str, InstanceAddress] = field(default_factory=dict)
    keep: list[str] = field(default_factory=list)
    drain: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    absences: dict[str, int] = field(default_factory=dict)

    @property
    def is_sure(self) -> bool:
        """False while an instance is missed that was not missed before: ask again soon."""
        return all(count >= ABSENCES_BEFORE_LEAVING for count in self.absences.values())


def make_plan(
    targets: Sequence[DnsTarget],
    known: Mapping[str, KnownInstance],
    absences: Mapping[str, int],
    *,
    is_taken: Callable[[str], bool],
    max_instances: int,
) -> DiscoveryPlan:
    """Compare an answer with what is known. is_taken: whether a name is another's, who was here first."""
    plan = DiscoveryPlan()
    named = _select(targets, known, is_taken, max_instances, plan.notes)
    for target in named.values():
        _place(target, known.get(target.name), plan)
    for name, instance in known.items():
        if name not in named:
            count = plan.absences[name] = min(absences.get(name, 0) + 1, ABSENCES_BEFORE_LEAVING)
            is_gone = count == ABSENCES_BEFORE_LEAVING and (bool(targets) or not instance.is_serving)
            if is_gone and (not instance.is_draining or instance.successor is not None):
                plan.drain.append(name)
    if not targets and known:
        plan.notes.append("the answer names nobody: instances that answer stay")
    return plan


def _select(
    targets: Sequence[DnsTarget],
    known: Mapping[str, KnownInstance],
    is_taken: Callable[[str], bool],
    max_instances: int,
    notes: list[str],
) -> dict[str, DnsTarget]:
    """Those that can be instances, by name; at most so many, those that are known first."""
    found: dict[str, DnsTarget] = {}
    for target in sorted(targets, key=lambda each: (each.name not in known, each.name, each.port, each.hosts)):
        if len(target.name) > 63 or not INSTANCE_NAME.fullmatch(target.name):
            notes.append(f"{target.name!r} cannot be an instance's name")
        elif target.name in found:
            notes.append(f"{target.name} is named twice")
        elif not 0 < target.port < 65_536:
            notes.append(f"{target.name} has port {target.port}")
        elif is_taken(target.name):
            notes.append(f"{target.name} is an instance already, and not by this name")
        elif len(found) == max_instances:
            notes.append(f"more than max_instances ({max_instances}) are named")
            break
        else:
            found[target.name] = target
    return found


def _place(target: DnsTarget, known: KnownInstance | None, plan: DiscoveryPlan) -> None:
    """What one that is named calls for."""
    if not target.hosts:
        if known is None:
            plan.notes.append(f"{target.name} has no address")
        elif known.is_draining and known.successor is None:
            plan.keep.append(target.name)
        return
    if known is None:
        plan.join[target.name] = InstanceAddress(target.hosts[0], target.port)
    elif known.successor is not None and _is_at(target, known.successor):
        return  # it may be at the same place, too, with other settings
    elif _is_at(target, known.place) and (known.is_serving or len(target.hosts) == 1):
        if known.is_draining:
            plan.keep.append(target.name)
    else:
        plan.replace[target.name] = InstanceAddress(_next_host(target.hosts, known.place.host), target.port)


def _is_at(target: DnsTarget, place: InstanceAddress) -> bool:
    return place.port == target.port and place.host in target.hosts


def _next_host(hosts: Sequence[str], host: str) -> str:
    """The one after it; the first if it is not among them."""
    return hosts[(hosts.index(host) + 1) % len(hosts)] if host in hosts else hosts[0]
