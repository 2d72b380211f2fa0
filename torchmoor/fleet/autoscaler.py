"""Keeps as many instances of each variant on this host as its policies ask for: starts them, drains and stops them.

Each look counts the backlog, decides (fleet/scaling) and brings the launcher's instances nearer to the decision:

    RUNNING    is being started, or serves
    LEAVING    drained: gets nothing new, and ends what it has; may be called back until it has nothing any more
    ENDING     nothing is sent there; its processes are being stopped

Backlog is all that waits or runs: asynchronous requests, and real-time ones that are held for an instance or are
outstanding at one. What came and went between two looks counts as one. With a journal any instance can serve a session,
so open ones need none to stay; without one, an instance leaves only when its sessions are over.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from time import monotonic
from typing import Protocol

from torchmoor.config.routing import ALL_TRAFFIC
from torchmoor.config.scaling import ScalingSettings
from torchmoor.errors import LaunchError, TorchmoorError
from torchmoor.fleet.launcher import Launch
from torchmoor.fleet.scaling import Scaling, decide, explain
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.operations import OperationAnswer
from torchmoor.proxy.instances.registry import Registry, Scale, Variant
from torchmoor.wire import operations

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between looks that nobody has asked for
MIN_LOOK_S = 0.02  # between any two, however many requests ask for one
PENDING_TIMEOUT_S = 1.0  # a queue that is slow to answer must not keep real-time requests waiting
ASK_TIMEOUT_S = 2.0
ASK_AGAIN_S = 5.0  # an instance that must stay is not asked for its sessions again before
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0  # after a start that failed


class Host(Protocol):
    """The launcher, as it is used here."""

    def begin(self, launch: Launch) -> asyncio.Future[None]:
        """Have an instance run; done when it is ready, or raises LaunchError."""
        ...

    async def end(self, name: str) -> None:
        """Stop an instance for good."""
        ...


class Counts(Protocol):
    """A variant's numbers since the start."""

    @property
    def num_sent(self) -> int:
        """Requests that were sent to an instance and are over."""
        ...


class Traffic(Protocol):
    """What a variant's clients do."""

    variant: Variant

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an instance."""
        ...

    @property
    def metrics(self) -> Counts:
        """What was counted."""
        ...


class Front(Protocol):
    """The proxy, of one process or several."""

    async def refresh(self) -> None:
        """Bring counts up to date, where that takes asking other processes."""
        ...

    def traffic(self) -> Iterable[Traffic]:
        """Of every variant."""
        ...

    def is_idle(self, instance: Instance) -> bool:
        """True if an instance that drains has nothing to do any more, and gets nothing."""
        ...


class Asker(Protocol):
    """Asks instances; fleet/operations."""

    async def ask(
        self, instance: Instance, operation: str, body: Mapping[str, object], *, timeout_s: float
    ) -> OperationAnswer | None:
        """Have an operation done; None if there is no answer."""
        ...


class Pending(Protocol):
    """An endpoint's asynchronous requests."""

    @property
    def waiting(self) -> int:
        """That nobody works on."""
        ...

    @property
    def running(self) -> int:
        """That somebody works on."""
        ...


class Phase(Enum):
    """See the module."""

    RUNNING = "running"
    LEAVING = "leaving"
    ENDING = "ending"


class Member:
    """An instance that the autoscaler has started. stays_until: it has sessions, and is not asked again before."""

    __slots__ = ("name", "phase", "task", "stays_until")

    def __init__(self, name: str, task: asyncio.Task[None]) -> None:
        self.name = name
        self.phase = Phase.RUNNING
        self.task = task
        self.stays_until: float | None = None


class Group:
    """One variant's instances. launches: MaxCapacity of them, the first to be started first."""

    def __init__(self, variant: Variant, settings: ScalingSettings, launches: Sequence[Launch]) -> None:
        assert len(launches) == settings.max_capacity
        self.variant = variant
        self.settings = settings
        self.launches = {launch.name: launch for launch in launches}
        self.members: dict[str, Member] = {}
        self.scaling = Scaling(settings.initial_count)
        self.num_sent = 0
        self.pending: Pending | None = None  # as last heard
        self.backoff_s = 0.0
        self.starts_after = 0.0

    def in_phase(self, phase: Phase) -> list[Member]:
        """The members in a phase, oldest first."""
        return [member for member in self.members.values() if member.phase is phase]


class Autoscaler:
    """`start` has the first instances run, `run` goes on for ever, `stop` ends what is under way but no instance."""

    def __init__(
        self,
        groups: Sequence[Group],
        registry: Registry,
        host: Host,
        front: Front,
        operations: Asker,
        report: Callable[[str], None],
        *,
        are_journaled: bool,
        find_pending: Callable[[str], Awaitable[Pending]] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """report: told what an operator wants to see. find_pending: an endpoint's asynchronous requests."""
        self._groups = groups
        self._registry = registry
        self._host = host
        self._front = front
        self._operations = operations
        self._report = report
        self._are_journaled = are_journaled
        self._find_pending = find_pending
        self._clock = clock
        self._woken = asyncio.Event()
        self._is_started = False

    async def start(self) -> None:
        """Have the initial instances ready. Raises LaunchError if one does not come up."""
        await asyncio.gather(*[self._begin(group) for group in self._groups for _ in range(group.scaling.desired)])
        self._is_started = True

    async def run(self) -> None:
        """Look again and again, and at once when it is woken."""
        while True:
            self._woken.clear()
            try:
                await self.look()
            except Exception:  # the next look may succeed, and without looks nothing ever starts
                logger.exception("autoscaler failed")
            await asyncio.sleep(MIN_LOOK_S)
            with suppress(TimeoutError):  # not wait_for: Python 3.11's can lose a cancellation
                async with asyncio.timeout(LOOK_S):
                    await self._woken.wait()

    async def stop(self) -> None:
        """Start and stop nothing any more."""
        tasks = [member.task for group in self._groups for member in group.members.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """Something waits: look now."""
        self._woken.set()

    async def look(self) -> None:
        """Count, decide and act, for every variant."""
        await self._front.refresh()
        traffic = {(each.variant.endpoint, each.variant.name): each for each in self._front.traffic()}
        for number, group in enumerate(self._groups):
            variant = group.variant
            is_first = variant.endpoint not in {other.variant.endpoint for other in self._groups[:number]}
            backlog = await self._count(group, traffic[variant.endpoint, variant.name], has_queue=is_first)
            before = group.scaling.desired
            now = self._clock()
            group.scaling = decide(group.settings, group.scaling, backlog=backlog, now=now)
            why = explain(group.settings, group.scaling, backlog=backlog, now=now)
            variant.scale = Scale(group.scaling.desired, backlog, why)
            if group.scaling.desired != before:
                self._report(f"{_name(variant)}: from {before} to {group.scaling.desired} instances, backlog {backlog}")
            await self._act(group)

    async def _count(self, group: Group, traffic: Traffic, *, has_queue: bool) -> int:
        """The backlog. has_queue: the endpoint's asynchronous requests are this variant's.

        One that runs is outstanding at its instance for most of its time, and is not counted twice.
        """
        outstanding = sum(instance.outstanding for instance in group.variant.pool.members)
        waiting = traffic.num_waiting
        if has_queue and self._find_pending is not None:
            try:
                async with asyncio.timeout(PENDING_TIMEOUT_S):
                    group.pending = await self._find_pending(group.variant.endpoint)
            except (TimeoutError, TorchmoorError) as error:  # what was last heard of it goes on to count
                logger.warning("queue does not answer endpoint=%s error=%s", group.variant.endpoint, error)
        if group.pending is not None:
            waiting += group.pending.waiting
            outstanding = max(outstanding, group.pending.running)
        num_sent = traffic.metrics.num_sent
        was_busy, group.num_sent = num_sent != group.num_sent, num_sent
        return max(waiting + outstanding, int(was_busy))

    # Acting

    async def _act(self, group: Group) -> None:
        """One step from what runs to what is desired."""
        await self._watch_leaving(group)
        running = group.in_phase(Phase.RUNNING)
        missing = group.scaling.desired - len(running)
        if missing > 0:
            for member in group.in_phase(Phase.LEAVING)[:missing]:
                self._call_back(member)
                missing -= 1
            while missing > 0 and self._can_begin(group):
                self._begin(group)
                missing -= 1
        elif missing < 0:
            await self._dismiss(group, running, -missing)

    def _can_begin(self, group: Group) -> bool:
        return len(group.members) < len(group.launches) and self._clock() >= group.starts_after

    def _begin(self, group: Group) -> asyncio.Task[None]:
        """Start the first of the variant's instances that does not run."""
        launch = next(launch for name, launch in group.launches.items() if name not in group.members)
        task = asyncio.create_task(self._until_ready(group, launch))
        group.members[launch.name] = Member(launch.name, task)
        return task

    async def _until_ready(self, group: Group, launch: Launch) -> None:
        try:
            await self._host.begin(launch)
        except LaunchError as error:
            if not self._is_started:  # the first ones of all: their failure is the fleet's
                raise
            group.backoff_s = min(max(MIN_BACKOFF_S, 2 * group.backoff_s), MAX_BACKOFF_S)
            logger.error("instance failed instance=%s error=%s", launch.name, error)
            self._report(f"{launch.name} could not be started; the next try is in {group.backoff_s:.0f} s: {error}")
            group.starts_after = self._clock() + group.backoff_s
            self._end(group, group.members[launch.name])
            return
        group.backoff_s = 0.0

    async def _dismiss(self, group: Group, running: Sequence[Member], number: int) -> None:
        """Let some go: those that serve nobody first, then those with the least to do, of them the youngest."""
        found = [(member, self._registry.find(member.name)) for member in reversed(running)]
        found.sort(key=lambda pair: (pair[1] is not None and pair[1].is_ready, pair[1].outstanding if pair[1] else 0))
        for member, instance in found:
            if number == 0:
                return
            if instance is None or instance.state in (InstanceState.STARTING, InstanceState.DOWN):
                self._end(group, member)
            elif await self._must_stay(member, instance):
                continue
            else:
                self._registry.drain(member.name)
                member.phase = Phase.LEAVING
                self._report(f"{member.name} draining")
            number -= 1

    async def _watch_leaving(self, group: Group) -> None:
        """Stop those that have nothing to do any more. One that an operator has resumed stays for another cool-down."""
        for member in group.in_phase(Phase.LEAVING):
            instance = self._registry.find(member.name)
            if instance is None or instance.state is InstanceState.DOWN:
                self._end(group, member)
            elif not self._registry.is_drained(member.name):
                member.phase = Phase.RUNNING
                # It was one less for this one, unless it has just become more.
                group.scaling = Scaling(min(group.scaling.desired + 1, group.settings.max_capacity))
            elif self._front.is_idle(instance) and not self._is_wanted(group):
                if await self._must_stay(member, instance):  # opened while it was asked for them
                    self._call_back(member)
                elif self._front.is_idle(instance):
                    self._end(group, member)

    def _is_wanted(self, group: Group) -> bool:
        """True if one that leaves shall be called back instead of being stopped."""
        return group.scaling.desired > len(group.in_phase(Phase.RUNNING))

    def _call_back(self, member: Member) -> None:
        member.phase = Phase.RUNNING
        self._registry.resume(member.name)
        self._report(f"{member.name} serves again")

    def _end(self, group: Group, member: Member) -> None:
        """Send an instance nothing from now on, and stop it."""
        member.phase = Phase.ENDING
        if self._registry.find(member.name) is not None:
            self._registry.dismiss(member.name)
        starting, member.task = member.task, asyncio.create_task(self._until_ended(group, member))
        if starting is not asyncio.current_task():
            starting.cancel()

    async def _until_ended(self, group: Group, member: Member) -> None:
        await self._host.end(member.name)
        del group.members[member.name]
        self._report(f"{member.name} stopped")
        self.wake()  # its name is free

    # Sessions

    async def _must_stay(self, member: Member, instance: Instance) -> bool:
        """True if an instance has sessions that nobody else could go on with."""
        if self._are_journaled:
            return False
        now = self._clock()
        if member.stays_until is not None and now < member.stays_until:
            return True
        answer = await self._operations.ask(instance, operations.STATUS, {}, timeout_s=ASK_TIMEOUT_S)
        num_open = None if answer is None else read_open_sessions(answer)
        if num_open == 0:
            member.stays_until = None
            return False
        if member.stays_until is None:
            why = "it does not answer" if num_open is None else f"{num_open} open sessions and no journal"
            self._report(f"{member.name} is not stopped yet: {why}")
        member.stays_until = now + ASK_AGAIN_S
        return True


def read_open_sessions(answer: OperationAnswer) -> int | None:
    """How many sessions an instance has; 0 if it is no handler of ours, None if it has trouble."""
    if answer.status >= 500:
        return None
    try:
        sessions = json.loads(answer.body).get("sessions")
    except (ValueError, AttributeError):
        return 0
    number = sessions.get("open") if isinstance(sessions, dict) else None
    return number if isinstance(number, int) else 0


def _name(variant: Variant) -> str:
    return variant.endpoint if variant.name == ALL_TRAFFIC else f"{variant.endpoint}/{variant.name}"
