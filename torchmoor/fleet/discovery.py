"""Service discovery by DNS: queries each entry's name repeatedly, and applies the answers to the registry.

discovery_plan.py decides what an answer changes. Without an answer the known instances stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from time import monotonic

from torchmoor.config.discovery import DiscoverySettings
from torchmoor.errors import DiscoveryError
from torchmoor.fault_log import FaultLog
from torchmoor.fleet import discovery_dns
from torchmoor.fleet.discovery_dns import DnsAnswer
from torchmoor.fleet.discovery_plan import DiscoveryPlan, DnsTarget, InstanceAddress, KnownInstance, make_plan
from torchmoor.fleet.draining import Drainer
from torchmoor.fleet.instance_names import InstanceNames
from torchmoor.proxy.instances.dns_source import DnsSource
from torchmoor.proxy.instances.handler_operations import HandlerOperations
from torchmoor.proxy.instances.instance import SERVING, Instance
from torchmoor.proxy.instances.registry import Registry
from torchmoor.tasks import cancel_all

logger = logging.getLogger(__name__)

JITTER = 0.1  # of an interval, so that proxies that start together do not stay in step
MAX_NOTES = 10

Ask = Callable[[DiscoverySettings], Awaitable[DnsAnswer]]


@dataclass(slots=True, eq=False)
class DiscoveryEntry:
    """One DNS name, and the state of its discovery."""

    settings: DiscoverySettings
    source: DnsSource
    names: InstanceNames
    backoff_s: float
    absences: dict[str, int] = field(default_factory=dict)
    faults: FaultLog = field(default_factory=lambda: FaultLog(logger))
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class FoundTargets:
    """The instances of a DNS answer. notes: what was ignored, and why. is_complete: the name of each is known."""

    targets: Sequence[DnsTarget]
    notes: tuple[str, ...] = ()
    is_complete: bool = True


class Discovery:
    """Runs discovery within its context.

    operations: for the names of instances that DNS lists only by address. are_journaled: other instances can continue a
    session; otherwise a drained instance stays until it is down.
    """

    def __init__(
        self,
        entries: Sequence[DiscoverySettings],
        registry: Registry,
        drainer: Drainer,
        operations: HandlerOperations,
        *,
        are_journaled: bool,
        ask: Ask = discovery_dns.ask,
        rng: Random | None = None,
    ) -> None:
        self._first = entries
        self._registry = registry
        self._drainer = drainer
        self._are_journaled = are_journaled
        self._ask = ask
        self._rng = rng or Random()
        self._operations = operations
        self.entries: dict[str, DiscoveryEntry] = {}  # by DNS name

    async def __aenter__(self) -> Discovery:
        self.take(self._first)
        return self

    async def __aexit__(self, *error: object) -> None:
        ended = list(self.entries.values())
        self.entries.clear()
        await cancel_all(entry.task for entry in ended if entry.task is not None)

    def take(self, entries: Iterable[DiscoverySettings]) -> None:
        """Replace the entries. Instances from a removed name are drained."""
        wanted = {settings.dns_name: settings for settings in entries}
        for dns_name, entry in list(self.entries.items()):
            if wanted.get(dns_name) == entry.settings:
                del wanted[dns_name]
            else:
                self._end(entry, wanted.get(dns_name))
        for settings in wanted.values():
            self._begin(settings)

    def _begin(self, settings: DiscoverySettings) -> None:
        source = DnsSource(settings.dns_name, settings.endpoint, settings.variant)
        self._registry.sources[settings.dns_name] = source
        names = InstanceNames(
            self._operations, lambda host: self._make(settings, "?", InstanceAddress(host, settings.port))
        )
        entry = self.entries[settings.dns_name] = DiscoveryEntry(settings, source, names, settings.min_interval_s)
        entry.task = asyncio.create_task(self._run(entry))

    def _end(self, entry: DiscoveryEntry, successor: DiscoverySettings | None) -> None:
        """Stop an entry. An entry of the same name, if given, takes over its instances."""
        dns_name = entry.settings.dns_name
        assert entry.task is not None
        entry.task.cancel()
        del self.entries[dns_name], self._registry.sources[dns_name]
        for name, known in self._known(dns_name).items():
            if successor is None:
                self._drainer.drain(name, is_for_good=True)
            elif successor.facts() != entry.settings.facts():
                self._drainer.drain(name, self._make(successor, name, known.successor or known.address))

    async def _run(self, entry: DiscoveryEntry) -> None:
        while self._is_current(entry):
            try:
                wait_s = await self.look(entry)
            except Exception as error:  # the next look may succeed; without looks nothing ever changes
                entry.faults.add(f"discovery failed dns_name={entry.settings.dns_name}", error, has_trace=True)
                wait_s = entry.settings.interval_s
            if self._is_current(entry):
                await asyncio.sleep(wait_s * self._rng.uniform(1 - JITTER, 1 + JITTER))

    def _is_current(self, entry: DiscoveryEntry) -> bool:
        """Return False for an entry that has ended: Python 3.11's wait_for, in dnspython, can lose its cancellation."""
        return self.entries.get(entry.settings.dns_name) is entry

    async def look(self, entry: DiscoveryEntry) -> float:
        """Query once and apply the answer. Returns the seconds until the next query."""
        settings = entry.settings
        try:
            answer = await self._ask(settings)
        except DiscoveryError as error:
            return self._on_failure(entry, str(error))
        found = FoundTargets(answer.targets) if settings.record == "SRV" else await self._name_hosts(entry, answer)
        if not self._is_current(entry):
            return 0.0
        self._on_answer(entry, answer)
        plan = self._plan(entry, found.targets)
        entry.absences = plan.absences
        self._apply(settings, plan)
        self._note(entry.source, (*plan.notes, *found.notes))
        ttl_s = settings.interval_s if answer.ttl_s is None else answer.ttl_s
        if not (found.is_complete and plan.is_settled):
            ttl_s = 0.0
        return max(settings.min_interval_s, min(ttl_s, settings.interval_s))

    async def _name_hosts(self, entry: DiscoveryEntry, answer: DnsAnswer) -> FoundTargets:
        """Find the names of the instances at the answer's addresses, at most max_instances, known ones first."""
        settings = entry.settings
        known = self._known(settings.dns_name).values()
        kept = {each.address.host for each in known}
        hosts = sorted(answer.hosts, key=lambda host: host not in kept)[: settings.max_instances]
        doubtful = {each.address.host for each in known if not each.is_serving}
        targets = await entry.names.find_targets(hosts, settings.port, doubtful=doubtful)
        notes = []
        if len(hosts) < len(answer.hosts):
            notes.append(f"more than max_instances ({settings.max_instances}) addresses are listed")
        notes += [_describe_shared(target) for target in targets if len(target.hosts) > 1]
        num_unnamed = len(set(hosts) - {host for target in targets for host in target.hosts})
        if num_unnamed:
            notes.append(f"{num_unnamed} addresses have not reported their instance name yet")
        return FoundTargets(targets, tuple(notes), is_complete=not num_unnamed)

    def _on_answer(self, entry: DiscoveryEntry, answer: DnsAnswer) -> None:
        source = entry.source
        if source.error:
            logger.warning("discovery recovered dns_name=%s", entry.settings.dns_name)
        source.answered_at, source.error = monotonic(), ""
        source.num_listed = len(answer.targets or answer.hosts)
        entry.backoff_s = entry.settings.min_interval_s

    def _on_failure(self, entry: DiscoveryEntry, error: str) -> float:
        source = entry.source
        source.num_failures += 1
        if not source.error:
            logger.warning("discovery failed, known instances stay error=%s", error)
        source.error = error
        wait_s, entry.backoff_s = entry.backoff_s, min(2 * entry.backoff_s, entry.settings.interval_s)
        return wait_s

    @staticmethod
    def _note(source: DnsSource, notes: Sequence[str]) -> None:
        shown = tuple(notes[:MAX_NOTES])
        for note in shown:
            if note not in source.notes:
                logger.warning("discovery dns_name=%s %s", source.dns_name, note)
        source.notes = shown

    # The registry

    def _known(self, dns_name: str) -> dict[str, KnownInstance]:
        """Return the instances from a name, except those that another source replaces."""
        found: dict[str, KnownInstance] = {}
        for instance in self._registry.instances():
            successor = self._drainer.find_successor(instance.name)
            if instance.source == dns_name and (successor is None or successor.source == dns_name):
                found[instance.name] = KnownInstance(
                    InstanceAddress(instance.host, instance.port),
                    is_serving=instance.state in SERVING,
                    is_draining=self._drainer.is_draining(instance.name),
                    successor=None if successor is None else InstanceAddress(successor.host, successor.port),
                )
        return found

    def _plan(self, entry: DiscoveryEntry, targets: Sequence[DnsTarget]) -> DiscoveryPlan:
        known = self._known(entry.settings.dns_name)

        def is_taken(name: str) -> bool:
            return name not in known and (self._registry.find(name) is not None or self._drainer.is_draining(name))

        return make_plan(targets, known, entry.absences, is_taken=is_taken, max_instances=entry.settings.max_instances)

    def _apply(self, settings: DiscoverySettings, plan: DiscoveryPlan) -> None:
        for name, place in plan.join.items():
            self._registry.add(self._make(settings, name, place))
        for name, place in plan.replace.items():
            logger.info("instance moves instance=%s host=%s port=%d", name, place.host, place.port)
            self._drainer.drain(name, self._make(settings, name, place))
        for name in plan.keep:
            self._drainer.keep(name)
        for name in plan.drain:
            logger.info("instance drained instance=%s dns_name=%s", name, settings.dns_name)
            # A StatefulSet's instance returns under its name, and stays drained if an operator drained it.
            is_for_good = settings.record != "SRV"
            self._drainer.drain(name, is_until_down=not self._are_journaled, is_for_good=is_for_good)

    def _make(self, settings: DiscoverySettings, name: str, place: InstanceAddress) -> Instance:
        variant = self._registry.get_endpoint(settings.endpoint).find_variant(settings.variant)
        assert variant is not None  # checked with the configuration
        return Instance(
            **settings.facts(),
            name=name,
            model=variant.settings.model,
            host=place.host,
            port=place.port,
            source=settings.dns_name,
        )


def _describe_shared(target: DnsTarget) -> str:
    """Describe a name at several addresses: one host, or instances that lack names of their own."""
    hosts = ", ".join(target.hosts[:MAX_NOTES])
    return (
        f"{len(target.hosts)} addresses ({hosts}) report the name {target.name}: one is used; if they are different "
        "instances, give each its own TORCHMOOR_INSTANCE"
    )


def try_once(entries: Iterable[DiscoverySettings], warn: Callable[[str], None]) -> dict[str, list[str]]:
    """Query each name once; returns its instance names or addresses. warn: called for each name without an answer."""

    async def ask(settings: DiscoverySettings) -> list[str]:
        try:
            answer = await discovery_dns.ask(settings)
        except DiscoveryError as error:
            warn(f"Discovery: {error}")
            return []
        found = [target.name for target in answer.targets] or list(answer.hosts)
        if not found:
            warn(f"Discovery: {settings.dns_name} has no {settings.record} record")
        return found

    async def run() -> dict[str, list[str]]:
        known = list(entries)
        return dict(zip((each.dns_name for each in known), await asyncio.gather(*map(ask, known)), strict=True))

    return asyncio.run(run())
