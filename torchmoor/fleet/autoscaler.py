"""Autoscaler that starts, drains and stops this host's instances as the variants' scaling policies require.

Each round (look) counts the backlog, decides (fleet/scaling.py) and starts, drains or stops instances accordingly.

The backlog is all requests that wait or run: asynchronous ones, and real-time ones that wait for an instance or are
outstanding at one. Requests that begin and end between two looks count as one. With a journal, any instance can serve a
session, so open sessions do not keep an instance. Without one, an instance stops only when its sessions have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from weakref import WeakKeyDictionary

from torchmoor.config.routing import ALL_TRAFFIC
from torchmoor.errors import START_RETRY_S, LaunchError, TorchmoorError
from torchmoor.fault_log import FaultLog
from torchmoor.fleet.data_plane_view import DataPlaneView, VariantTraffic
from torchmoor.fleet.launcher import Launcher
from torchmoor.fleet.scaled_variant import Phase, ScaledInstance, ScaledVariant
from torchmoor.fleet.scaling import Scaling, decide, explain, is_limited
from torchmoor.fleet.torchserve import Launch
from torchmoor.proxy.instances.endpoint import ScalingDecision, Variant
from torchmoor.proxy.instances.handler_operations import OperationAnswer
from torchmoor.proxy.instances.instance import SERVING, Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.routing.reported_status import parse_status
from torchmoor.tasks import cancel_all, wait_at_most
from torchmoor.wire.operations import STATUS

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between looks
MIN_LOOK_S = 0.02  # between looks that requests ask for
PENDING_TIMEOUT_S = 1.0  # so that a slow queue does not delay real-time requests
SESSIONS_TIMEOUT_S = 2.0
SESSIONS_INTERVAL_S = 5.0  # between queries to an instance that has sessions
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0  # after a failed start


class Autoscaler:
    """Scales variants: `start` the initial instances, `run` forever, `stop` without stopping any instance.

    report: shows a message to the operator. on_decided: called with a variant whose desired number has changed, and
    the number before.
    """

    def __init__(
        self,
        variants: Sequence[ScaledVariant],
        registry: Registry,
        launcher: Launcher,
        data: DataPlaneView,
        report: Callable[[str], None],
        *,
        are_journaled: bool,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._scaled = list(variants)
        self._registry = registry
        self._launcher = launcher
        self._data = data
        self._report = report
        self._are_journaled = are_journaled
        self._clock = clock
        self._faults = FaultLog(logger, clock=clock)
        self._faults_of: WeakKeyDictionary[ScaledVariant, FaultLog] = WeakKeyDictionary()
        self.on_decided: Callable[[Variant, int], None] = lambda variant, before: None
        self._woken = asyncio.Event()
        self._is_started = False

    async def start(self) -> None:
        """Start the initial instances and wait until they are ready. Raises LaunchError if one fails."""
        await asyncio.gather(*[self._begin(scaled) for scaled in self._scaled for _ in range(scaled.scaling.desired)])
        self._is_started = True

    async def run(self) -> None:
        """Look at intervals, and at once after `wake`."""
        while True:
            self._woken.clear()
            try:
                await self.look()
            except Exception as error:  # the next look may succeed; without looks no instance ever starts
                self._faults.add("autoscaler failed", error, has_trace=True)
            await asyncio.sleep(MIN_LOOK_S)
            await wait_at_most(LOOK_S, self._woken)

    async def stop(self) -> None:
        """Stop scaling. Instances keep running."""
        members = [member for scaled in self._scaled for member in scaled.members.values()]
        await cancel_all(member.task for member in members if member.task is not None)

    def add(self, scaled: ScaledVariant) -> None:
        """Scale one more variant from now on."""
        self._is_started = True
        self._scaled.append(scaled)
        self.wake()

    async def remove(self, scaled: ScaledVariant) -> None:
        """Stop scaling a variant, and wait for the instances that are being stopped. The others keep running."""
        self._scaled.remove(scaled)
        scaled.variant.scale = None
        tasks = []
        for member in scaled.members.values():
            if member.task is not None:
                tasks.append(member.task)
                if member.phase is not Phase.STOPPING:
                    member.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """Look now, because a request waits."""
        self._woken.set()

    async def look(self) -> None:
        """Count, decide and act, for every variant."""
        await self._data.refresh()
        traffic = {each.variant: each for each in self._data.traffic()}
        served = [scaled for scaled in self._scaled if scaled.variant in traffic]
        for number, scaled in enumerate(served):
            variant = scaled.variant
            is_first = variant.endpoint not in {other.variant.endpoint for other in served[:number]}
            try:
                await self._look_at(scaled, traffic[variant], has_queue=is_first)
            except Exception as error:  # the other variants scale, and the next look may succeed
                faults = self._faults_of.setdefault(scaled, FaultLog(logger, clock=self._clock))
                kind = f"variant is not scaled endpoint={variant.endpoint} variant={variant.name}"
                faults.add(kind, error, has_trace=True)

    async def _look_at(self, scaled: ScaledVariant, load: VariantTraffic, *, has_queue: bool) -> None:
        backlog = await self._count(scaled, load, has_queue=has_queue)
        if scaled not in self._scaled:  # removed meanwhile
            return
        self._note_withdrawn(scaled)
        self._decide(scaled, backlog, scaled.recent_requests.count(load.metrics.invocations, self._clock()))
        await self._act(scaled, backlog)

    def _decide(self, scaled: ScaledVariant, backlog: int, invocations: int) -> None:
        """Set the desired number of instances, and report a change. invocations: requests of the last minute."""
        variant, settings, before, now = scaled.variant, scaled.settings, scaled.scaling.desired, self._clock()
        demand = {"backlog": backlog, "invocations": invocations}
        until = self._awaited_until(scaled, now)
        scaled.scaling = decide(settings, scaled.scaling, **demand, now=now, awaited_until=until)
        scaled.has_failed &= scaled.scaling.low_since is not None
        why = explain(settings, scaled.scaling, **demand, now=now, is_awaited=until is not None)
        are_needed = backlog > 0 and scaled.scaling.desired == settings.max_capacity  # those drained by operators
        is_short = is_limited(settings, scaled.scaling, **demand) or (are_needed and _lacks_withdrawn(scaled))
        variant.scale = ScalingDecision(scaled.scaling.desired, backlog, why + _explain_withdrawn(scaled), is_short)
        if scaled.scaling.desired != before:
            self.on_decided(variant, before)
            load = f"{invocations} requests per minute" if settings.counts_invocations else f"backlog {backlog}"
            self._report(f"{_name(variant)}: from {before} to {scaled.scaling.desired} instances, {load}")

    async def _count(self, scaled: ScaledVariant, load: VariantTraffic, *, has_queue: bool) -> int:
        """Return the backlog. has_queue: the endpoint's asynchronous requests count for this variant.

        A running asynchronous request is also outstanding at its instance, and counts once.
        """
        outstanding = sum(instance.outstanding for instance in scaled.variant.pool.members)
        waiting = load.num_waiting
        if has_queue and self._data.async_inference is not None:
            try:
                async with asyncio.timeout(PENDING_TIMEOUT_S):
                    scaled.pending = await self._data.async_inference.queue.backlog(scaled.variant.endpoint)
            except (TimeoutError, TorchmoorError) as error:  # the last known backlog still counts
                logger.warning("queue does not answer endpoint=%s error=%s", scaled.variant.endpoint, error)
        if scaled.pending is not None:
            waiting += scaled.pending.waiting
            outstanding = max(outstanding, scaled.pending.running)
        num_sent = load.metrics.num_sent
        was_busy, scaled.num_sent = num_sent != scaled.num_sent, num_sent
        return max(waiting + outstanding, int(was_busy))

    def _awaited_until(self, scaled: ScaledVariant, now: float) -> float | None:
        """Return when the last client that was sent a Retry-After is due to return; None if no instance starts.

        A start after a failed one does not count: otherwise, instances that cannot start would be tried forever.
        """
        starting = [member for member in scaled.in_phase(Phase.RUNNING) if member.is_starting]
        if not starting or scaled.has_failed:
            return None
        until = now + START_RETRY_S
        if (last_s := scaled.variant.last_start_s) is not None:  # see unavailable.none_started_in_time
            found = [self._registry.find(member.name) for member in starting]
            times = [each.started_at for each in found if each is not None and each.started_at is not None]
            until = max((until, *(at + last_s + 1 for at in times)))
        return until + LOOK_S

    # Acting

    async def _act(self, scaled: ScaledVariant, backlog: int) -> None:
        """Start, resume or drain instances until as many run as desired."""
        await self._check_draining(scaled)
        if scaled not in self._scaled:  # removed meanwhile
            return
        running = scaled.in_phase(Phase.RUNNING)
        missing = scaled.scaling.desired - len(running)
        if missing > 0:
            if not backlog:  # only requests, or MinCapacity, need a replacement of a withdrawn instance
                num_withdrawn = len(scaled.in_phase(Phase.WITHDRAWN))
                missing = max(0, missing - num_withdrawn, scaled.settings.min_capacity - len(running))
            for member in scaled.in_phase(Phase.DRAINING)[:missing]:
                self._resume(member)
                missing -= 1
            while missing > 0 and self._can_begin(scaled):
                self._begin(scaled)
                missing -= 1
        elif missing < 0:
            await self._drain(scaled, running, -missing)

    def _can_begin(self, scaled: ScaledVariant) -> bool:
        return not scaled.is_full and self._clock() >= scaled.starts_after

    def _begin(self, scaled: ScaledVariant) -> asyncio.Task[None]:
        """Start the variant's first instance that does not run."""
        launch = next(launch for name, launch in scaled.launches.items() if name not in scaled.members)
        task = asyncio.create_task(self._until_ready(scaled, launch))
        scaled.members[launch.name] = ScaledInstance(launch.name, task)
        return task

    async def _until_ready(self, scaled: ScaledVariant, launch: Launch) -> None:
        try:
            await self._launcher.begin(launch)
        except LaunchError as error:
            if not self._is_started:  # an initial instance: the fleet fails with it
                raise
            scaled.backoff_s = min(max(MIN_BACKOFF_S, 2 * scaled.backoff_s), MAX_BACKOFF_S)
            logger.error("instance failed instance=%s error=%s", launch.name, error)
            self._report(f"{launch.name} could not be started; the next try is in {scaled.backoff_s:.0f} s: {error}")
            scaled.starts_after = self._clock() + scaled.backoff_s
            scaled.has_failed = True
            self._stop(scaled, scaled.members[launch.name])
            return
        scaled.backoff_s = 0.0

    async def _drain(self, scaled: ScaledVariant, running: Sequence[ScaledInstance], number: int) -> None:
        """Drain some instances: first those that do not serve, then the least loaded, the newest first among equals."""
        found = [(member, self._registry.find(member.name)) for member in reversed(running)]
        found.sort(key=lambda pair: (pair[1] is not None and pair[1].is_ready, pair[1].outstanding if pair[1] else 0))
        for member, instance in found:
            if number == 0:
                return
            if instance is None or instance.state not in SERVING:
                self._stop(scaled, member)
            elif await self._must_stay(member, instance):
                continue
            elif scaled not in self._scaled:  # removed meanwhile
                return
            elif not self._registry.is_drained(member.name):  # an operator's drain, which came meanwhile, stays
                self._registry.drain(member.name, is_resumable=True)
                member.phase = Phase.DRAINING
                self._report(f"{member.name} draining")
            number -= 1

    def _note_withdrawn(self, scaled: ScaledVariant) -> None:
        """Note what operators have drained and resumed. An instance that is resumed stays for another cool-down."""
        desired, most = scaled.scaling.desired, scaled.settings.max_capacity
        for member in scaled.in_phase(Phase.RUNNING):
            if self._registry.is_drained(member.name):
                member.phase, member.withdrawn_from = Phase.WITHDRAWN, desired
        for member in scaled.in_phase(Phase.DRAINING):
            instance = self._registry.find(member.name)
            if instance is not None and self._registry.is_drained(member.name) and not instance.is_resumable:
                member.phase, member.withdrawn_from = Phase.WITHDRAWN, desired + 1  # it is still stopped when idle
        for member in scaled.in_phase(Phase.WITHDRAWN):
            member.withdrawn_from = max(member.withdrawn_from, desired)
            if not self._registry.is_drained(member.name):
                member.phase = Phase.RUNNING
                if len(scaled.in_phase(Phase.RUNNING)) > scaled.scaling.desired:
                    scaled.scaling = Scaling(min(scaled.scaling.desired + 1, most))

    async def _check_draining(self, scaled: ScaledVariant) -> None:
        """Stop the idle ones. One that an operator has resumed stays for a cool-down."""
        for member in scaled.in_phase(Phase.WITHDRAWN):
            if scaled.scaling.desired < max(1, member.withdrawn_from):
                await self._stop_if_idle(scaled, member)
                if scaled not in self._scaled:  # removed meanwhile
                    return
        for member in scaled.in_phase(Phase.DRAINING):
            is_up = self._find_up(member) is not None
            if is_up and not self._registry.is_drained(member.name):
                member.phase = Phase.RUNNING
                # The desired count excluded this instance, unless a scale-out has just raised it.
                scaled.scaling = Scaling(min(scaled.scaling.desired + 1, scaled.settings.max_capacity))
            elif not (is_up and self._is_wanted(scaled)):
                await self._stop_if_idle(scaled, member)
                if scaled not in self._scaled:  # removed meanwhile
                    return

    def _find_up(self, member: ScaledInstance) -> Instance | None:
        """Return the instance, unless it is down or gone."""
        instance = self._registry.find(member.name)
        return None if instance is None or instance.state is InstanceState.DOWN else instance

    async def _stop_if_idle(self, scaled: ScaledVariant, member: ScaledInstance) -> None:
        """Stop an instance that has nothing to do. One that the autoscaler drains serves again if it has sessions."""
        if (instance := self._find_up(member)) is not None:
            if not self._data.is_idle(instance):
                return
            must_stay = await self._must_stay(member, instance)
            if scaled not in self._scaled or not self._registry.is_drained(member.name):  # removed or resumed meanwhile
                return
            if must_stay and member.phase is Phase.DRAINING:
                self._resume(member)
            if must_stay or not self._data.is_idle(instance):
                return
        self._stop(scaled, member)

    def _is_wanted(self, scaled: ScaledVariant) -> bool:
        """Return whether a draining instance will be resumed instead of stopped."""
        return scaled.scaling.desired > len(scaled.in_phase(Phase.RUNNING))

    def _resume(self, member: ScaledInstance) -> None:
        instance = self._registry.find(member.name)
        assert instance is not None  # _check_draining has stopped it otherwise
        if not instance.is_resumable:  # an operator has drained it meanwhile
            return
        member.phase = Phase.RUNNING
        self._registry.resume(member.name)
        self._report(f"{member.name} serves again")

    def _stop(self, scaled: ScaledVariant, member: ScaledInstance) -> None:
        """Remove an instance from routing, and stop it."""
        member.phase = Phase.STOPPING
        if self._registry.find(member.name) is not None:
            self._registry.dismiss(member.name)
        starting, member.task = member.task, asyncio.create_task(self._until_stopped(scaled, member))
        if starting is not None and starting is not asyncio.current_task():
            starting.cancel()

    async def _until_stopped(self, scaled: ScaledVariant, member: ScaledInstance) -> None:
        await self._launcher.end(member.name)
        del scaled.members[member.name]
        self._report(f"{member.name} stopped")
        self.wake()  # its name can be used again

    # Sessions

    async def _must_stay(self, member: ScaledInstance, instance: Instance) -> bool:
        """Return whether an instance has sessions that no other instance can continue."""
        if self._are_journaled:
            return False
        now = self._clock()
        if member.stays_until is not None and now < member.stays_until:
            return True
        answer = await self._data.operations.ask(instance, STATUS, {}, timeout_s=SESSIONS_TIMEOUT_S)
        num_open = None if answer is None else read_open_sessions(answer)
        if num_open == 0:
            member.stays_until = None
            return False
        if member.stays_until is None:
            why = "it does not answer" if num_open is None else f"{num_open} open sessions and no journal"
            self._report(f"{member.name} is not stopped yet: {why}")
        member.stays_until = now + SESSIONS_INTERVAL_S
        return True


def read_open_sessions(answer: OperationAnswer) -> int | None:
    """Read the number of open sessions: 0 if the handler is not ours, None if the instance failed."""
    return None if answer.status >= 500 else parse_status(answer.content()).open_sessions or 0


def _explain_withdrawn(scaled: ScaledVariant) -> str:
    """Return the end of the explanation if operators have drained instances."""
    names = ", ".join(sorted(member.name for member in scaled.in_phase(Phase.WITHDRAWN)))
    if not names:
        return ""
    full = ", and MaxCapacity is reached" if scaled.is_full else ""
    return f"; drained by an operator: {names}{full}"


def _lacks_withdrawn(scaled: ScaledVariant) -> bool:
    """Return whether nothing can be started in place of instances that operators have drained."""
    return scaled.is_full and bool(scaled.in_phase(Phase.WITHDRAWN))


def _name(variant: Variant) -> str:
    return variant.endpoint if variant.name == ALL_TRAFFIC else f"{variant.endpoint}/{variant.name}"
