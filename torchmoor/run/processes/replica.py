"""One of several proxy processes: a data plane that is told by its parent which instances there are.

    python -m torchmoor.run.processes.replica DESCRIPTOR LOG_LEVEL

DESCRIPTOR: the socket to the parent. It ends when the parent says so, when the parent is gone, or at SIGTERM, each
time letting what runs come to its end; after SIGTERM alone the parent starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack, suppress

import uvloop

from torchmoor.errors import TorchmoorError
from torchmoor.fleet.status import forget_lost, take_status
from torchmoor.proxy.dispatch.decisions import DecisionQuery
from torchmoor.proxy.instances.breaker import BreakerState
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.instances.shared_counts import SharedCounts
from torchmoor.run.data_plane import DataPlane
from torchmoor.run.processes.link import Assignment, Link, Message, from_text, read_status
from torchmoor.run.processes.totals import make_report
from torchmoor.run.processes.waiting import WaitingElsewhere

logger = logging.getLogger(__name__)

REPORT_S = 1.0
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s[%(process)d] %(message)s"


class Replica:
    """The data plane of one process, its counts in the shared map, and the messages that keep it up to date."""

    def __init__(self, assignment: Assignment, link: Link) -> None:
        settings = assignment.settings
        self._assignment = assignment
        self._link = link
        self.registry = Registry(settings.endpoints)
        # One process works for all: what an instance is sent at a time is counted in one place.
        self._plane = DataPlane(settings, self.registry, self._suspect, has_async_workers=assignment.row == 0)
        self._counts = SharedCounts(assignment.counts, num_rows=assignment.num_rows, row=assignment.row)
        self._waiting: list[WaitingElsewhere] = []
        self._is_obeying = False  # what changes now is the parent's doing, and need not be told it
        self._cut_off: set[str] = set()  # instances whose breaker has opened, here or in another process
        self._marks: dict[str, int] = {}  # of each instance's models, from before it was last asked
        self._stack = AsyncExitStack()
        for endpoint in self.registry.endpoints():
            for variant in endpoint.variants:
                if variant.models is not None:
                    variant.models.on_expected = self._on_expected
        self.registry.listen(self._on_change)

    async def start(self) -> None:
        """Everything but the listener."""
        await self._plane.start(self._stack)
        self._plane.on_need(lambda: self._link.send("held"))
        loop = asyncio.get_running_loop()
        assignment = self._assignment
        if assignment.uses_counts:
            for number, dispatcher in enumerate(self._plane.gateway.dispatchers()):
                dispatcher.others = WaitingElsewhere(
                    self._counts, number, assignment.wakers, dispatcher.on_free_elsewhere
                )
                self._waiting.append(dispatcher.others)
            own = assignment.wakers[assignment.row]
            loop.add_reader(own, self._on_woken, own)
            self._stack.callback(loop.remove_reader, own)
        beat = asyncio.create_task(self._beat())
        self._stack.callback(beat.cancel)

    async def stop(self) -> None:
        """Let what runs end, then say how it all went."""
        await self._stack.aclose()
        for waiting in self._waiting:
            waiting.stop()
        self._report()

    # From the parent

    async def obey(self, message: Message) -> None:
        """One message but `stop`."""
        match message["kind"]:
            case "listen":
                await self._plane.listen(self._stack, port=self._assignment.port, is_shared=True)
                self._link.send("ready")
            case "report":
                self._report()
            case "decisions":
                told = self._plane.gateway.decisions.describe(DecisionQuery(**message["query"]))
                self._link.send("decisions", round=message["round"], told=told)
            case "credentials":
                self._plane.take_credentials(from_text(message["credentials"]))
            case "reload_tls":
                self._plane.reload_tls()
            case "reopen_log":
                self._plane.reopen_log()
            case _:
                self._is_obeying = True
                try:
                    self._learn(message)
                finally:
                    self._is_obeying = False

    def _learn(self, message: Message) -> None:
        """Of an instance."""
        match message["kind"]:
            case "instance":
                self._take_instance(message)
            case "removed":
                self._counts.detach(message["name"])
                self.registry.remove(message["name"])
            case "asked" | "status" | "expecting":
                self._take_holdings(message)
            case "breaker":
                self._take_breaker(message["name"], is_open=message["is_open"])

    def _take_instance(self, message: Message) -> None:
        facts, state = message["facts"], InstanceState(message["state"])
        if self.registry.find(facts["name"]) is None:
            instance = Instance(**facts)
            self.registry.add(instance)
            self._counts.attach(instance, message["slot"])
        self.registry.set_state(facts["name"], state)
        known = self.registry.find(facts["name"])
        if known is not None:
            self.registry.variant_of(known).last_start_s = message["last_start_s"]

    def _take_holdings(self, message: Message) -> None:
        """What an instance has room for, holds, or will hold soon."""
        instance = self.registry.find(message["name"])
        if instance is None or not instance.is_ready:
            return
        name, models = instance.name, self.registry.variant_of(instance).models
        match message["kind"]:
            case "asked":
                self._marks[name] = 0 if models is None else models.mark()
            case "status":
                take_status(instance, read_status(message), models, self._marks.get(name, 0))
            case "expecting" if models is not None:
                models.expect(message["model"], name)

    def _take_breaker(self, name: str, *, is_open: bool) -> None:
        instance = self.registry.find(name)
        if instance is None:
            return
        if is_open:
            self._cut_off.add(name)
            self._plane.recovery.cut_off(instance)
        else:
            self._cut_off.discard(name)
            self._plane.recovery.on_answered(instance)

    # To the parent

    def _suspect(self, instance: Instance) -> None:
        self._link.send("suspect", name=instance.name)

    def _on_change(self, instance: Instance) -> None:
        name, breaker = instance.name, instance.breaker.state
        is_gone = self.registry.find(name) is not instance
        forget_lost(self.registry, instance)
        if is_gone or instance.state is not InstanceState.READY:
            self._cut_off.discard(name)
            self._marks.pop(name, None)
            if not is_gone and instance.state is InstanceState.DOWN and not self._is_obeying:
                self._link.send("down", name=name, port=instance.port)
        elif not self._is_obeying:
            is_open = breaker is BreakerState.OPEN
            if is_open and name not in self._cut_off:
                self._cut_off.add(name)
                self._link.send("breaker", name=name, is_open=True)
            elif breaker is BreakerState.CLOSED and name in self._cut_off:
                self._cut_off.discard(name)
                self._link.send("breaker", name=name, is_open=False)

    def _on_expected(self, model: str, name: str) -> None:
        if not self._is_obeying:
            self._link.send("expecting", model=model, name=name)

    def _report(self) -> None:
        plane = self._plane
        log = None if plane.observer is None else plane.observer.log
        self._link.send("report", report=make_report(self.registry, plane.gateway.dispatchers(), plane.num_denied, log))

    # Time

    def _on_woken(self, waker: int) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(waker)
        for dispatcher in self._plane.gateway.dispatchers():
            dispatcher.on_free_elsewhere()

    async def _beat(self) -> None:
        """Breakers and shares move on, and the parent hears that this process lives."""
        interval_s = self._assignment.settings.health.starting_interval_s
        reported = 0.0
        while True:
            self._plane.recovery.tick()
            now = asyncio.get_running_loop().time()
            if now - reported >= REPORT_S:
                reported = now
                self._report()
            await asyncio.sleep(min(interval_s, REPORT_S))


async def run(own: socket.socket) -> None:
    """Until the parent or a signal ends it."""
    link = await Link.open(own)
    messages = link.receive()
    first = await anext(messages, None)
    if first is None:
        return
    loop = asyncio.get_running_loop()
    terminated = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, terminated.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the parent passes on what it means
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the parent got it as well
    try:
        replica = Replica(from_text(first["assignment"]), link)
        await replica.start()
    except (TorchmoorError, OSError) as error:
        link.send("failed", error=str(error))
        link.close()
        return

    async def obey() -> None:
        async for message in messages:
            if message["kind"] == "stop":
                return
            await replica.obey(message)

    obeying, ending = asyncio.create_task(obey()), asyncio.create_task(terminated.wait())
    try:
        await asyncio.wait((obeying, ending), return_when=asyncio.FIRST_COMPLETED)
        if obeying.done():
            obeying.result()
    except (TorchmoorError, OSError) as error:
        link.send("failed", error=str(error))
    finally:
        ending.cancel()
        obeying.cancel()
        await replica.stop()
        link.close()


def main(arguments: list[str]) -> None:
    """The process."""
    own = socket.socket(fileno=int(arguments[0]))
    logging.basicConfig(level=int(arguments[1]), stream=sys.stderr, format=LOG_FORMAT)
    uvloop.run(run(own))


if __name__ == "__main__":
    main(sys.argv[1:])
