"""A child process of the proxy: a data plane that gets the instances and their states from its parent.

The child ends on the parent's message `stop`, when the parent is gone, or at SIGTERM; in each case running requests may
end first. Only after SIGTERM does the parent start another child.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from contextlib import AsyncExitStack

import uvloop

from torchmoor.control.plane import describing_plane
from torchmoor.errors import TorchmoorError
from torchmoor.fleet.status_poller import forget_lost, take_status
from torchmoor.proxy.dispatch.recent_decisions import DecisionQuery
from torchmoor.proxy.instances.breaker import BreakerState
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.data_plane import DataPlane
from torchmoor.run.log import start_log
from torchmoor.run.processes.link import ChildAssignment, Link, Message, from_text
from torchmoor.run.processes.totals import make_report

logger = logging.getLogger(__name__)

REPORT_S = 1.0


class ChildProxy:
    """Runs the data plane of one process and exchanges messages with its parent."""

    def __init__(self, assignment: ChildAssignment, link: Link) -> None:
        settings = assignment.settings
        self._assignment = assignment
        self._link = link
        self.registry = Registry(settings.endpoints, is_copy=True)
        control = describing_plane(settings, self.registry).answer
        # Only one child works on asynchronous requests, so that their number at an instance is counted in one place.
        has_workers = assignment.index == 0
        self._plane = DataPlane(settings, self.registry, self._suspect, control, has_async_workers=has_workers)
        self._is_following = False  # the parent causes the change, so it is not reported back
        self._cut_off: set[str] = set()  # instances whose breaker has opened, here or in another child
        self._marks: dict[str, int] = {}  # each instance's mark from before its last status query
        self._stack = AsyncExitStack()
        for endpoint in self.registry.endpoints():
            for variant in endpoint.variants:
                if variant.models is not None:
                    variant.models.on_expected = self._on_expected
        self.registry.listen(self._on_change)

    async def start(self) -> None:
        """Start everything but the listener."""
        await self._plane.start(self._stack)
        self._plane.on_need(lambda: self._link.send("waiting"))
        ticking = asyncio.create_task(self._tick())
        self._stack.callback(ticking.cancel)

    async def stop(self) -> None:
        """Let running requests end, then send the last report."""
        await self._stack.aclose()
        self._report()

    # From the parent

    async def on_message(self, message: Message) -> None:
        """Handle any message but `stop`."""
        match message["kind"]:
            case "listen":
                await self._plane.listen(self._stack, port=self._assignment.port, is_shared=True)
                self._link.send("ready")
            case "report":
                self._report()
            case "decisions":
                found = self._plane.dispatchers.decisions.describe(DecisionQuery(**message["query"]))
                self._link.send("decisions", round=message["round"], found=found)
            case "command":
                command, values = from_text(message["call"])
                self._plane.carry_out(command, *values)
            case _:
                self._is_following = True
                try:
                    self._follow(message)
                finally:
                    self._is_following = False

    def _follow(self, message: Message) -> None:
        """Apply the parent's message about an instance."""
        if message["kind"] == "instance":
            self._take_instance(message)
            return
        name = message["name"]
        instance = self.registry.find(name)
        if instance is None:
            return
        models = self.registry.variant_of(instance).models
        match message["kind"]:
            case "removed":
                self.registry.remove(name)
            case "breaker":
                self._take_breaker(instance, is_open=message["is_open"])
            case "asked" if instance.is_ready:
                self._marks[name] = 0 if models is None else models.mark()
            case "status" if instance.is_ready:
                take_status(instance, from_text(message["status"]), models, self._marks.get(name, 0))
            case "expecting" if instance.is_ready and models is not None:
                models.expect(message["model"], name)

    def _take_instance(self, message: Message) -> None:
        facts, state = message["facts"], InstanceState(message["state"])
        instance = self.registry.find(facts["name"])
        if instance is None:
            instance = Instance(**facts)
            self.registry.add(instance)
        instance.batches_sequences = message["batches_sequences"]
        instance.is_drained, instance.is_resumable = message["is_drained"], message["is_resumable"]
        self.registry.variant_of(instance).last_start_s = message["last_start_s"]
        self.registry.set_state(instance.name, state)

    def _take_breaker(self, instance: Instance, *, is_open: bool) -> None:
        recovery = self._plane.recovery
        if not is_open:
            self._cut_off.discard(instance.name)
            recovery.restore(instance)
        elif recovery.try_cut_off(instance):
            self._cut_off.add(instance.name)

    # To the parent

    def _suspect(self, instance: Instance) -> None:
        self._link.send("suspect", name=instance.name)

    def _on_change(self, instance: Instance) -> None:
        name, breaker = instance.name, instance.breaker.state
        is_gone = not self.registry.has(instance)
        forget_lost(self.registry, instance)
        if is_gone or instance.state is not InstanceState.READY:
            self._cut_off.discard(name)
            self._marks.pop(name, None)
            if not is_gone and instance.state is InstanceState.DOWN and not self._is_following:
                self._link.send("down", name=name, port=instance.port)
        elif not self._is_following:
            is_open = breaker is BreakerState.OPEN
            if is_open and name not in self._cut_off:
                self._cut_off.add(name)
                self._link.send("breaker", name=name, is_open=True)
            elif breaker is BreakerState.CLOSED and name in self._cut_off:
                self._cut_off.discard(name)
                self._link.send("breaker", name=name, is_open=False)

    def _on_expected(self, model: str, name: str) -> None:
        if not self._is_following:
            self._link.send("expecting", model=model, name=name)

    def _report(self) -> None:
        self._link.send("report", report=make_report(self.registry, self._plane.traffic(), self._plane.counts()))

    async def _tick(self) -> None:
        """Advance breakers and shares, and send a report, which also shows the parent that this process is alive."""
        interval_s = self._assignment.settings.health.starting_interval_s
        reported = 0.0
        while True:
            self._plane.tick()
            now = asyncio.get_running_loop().time()
            if now - reported >= REPORT_S:
                reported = now
                self._report()
            await asyncio.sleep(min(interval_s, REPORT_S))


async def run(own: socket.socket) -> None:
    """Serve until the parent or a signal ends it."""
    link = await Link.open(own)
    messages = link.receive()
    first = await anext(messages, None)
    if first is None:
        return
    loop = asyncio.get_running_loop()
    terminated = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, terminated.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the parent gets it too, and sends `stop`
    try:
        proxy = ChildProxy(from_text(first["assignment"]), link)
        await proxy.start()
    except (TorchmoorError, OSError) as error:
        link.send("failed", error=str(error))
        link.close()
        return

    async def follow() -> None:
        async for message in messages:
            if message["kind"] == "stop":
                return
            await proxy.on_message(message)

    following, ending = asyncio.create_task(follow()), asyncio.create_task(terminated.wait())
    try:
        await asyncio.wait((following, ending), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
    except (TorchmoorError, OSError) as error:
        link.send("failed", error=str(error))
    finally:
        ending.cancel()
        following.cancel()
        await proxy.stop()
        link.close()


def serve(descriptor: int, log_level: int) -> None:
    """Serve until the process is to end. descriptor: of the socket to the parent."""
    gc.freeze()  # the imported modules, which a full collection would visit while requests wait
    own = socket.socket(fileno=descriptor)
    start_log(log_level, names_process=True)
    uvloop.run(run(own))
