"""The parent of several child processes that run the data plane.

The parent serves no request. It reserves the port, starts and restarts the children, sends them the state of every
instance, sends what one child learns about an instance to the others, and adds up their counters.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict
from typing import Any

from torchmoor.config.settings import ProxySettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.data_plane_view import Values
from torchmoor.fleet.process_commands import ProcessParts
from torchmoor.metrics.process_counts import ProcessCounts
from torchmoor.proxy.access.tls import make_tls
from torchmoor.proxy.dispatch.recent_decisions import DecisionQuery, join_decisions
from torchmoor.proxy.instances.breaker import BreakerState
from torchmoor.proxy.instances.handler_operations import HandlerOperations
from torchmoor.proxy.instances.instance import SERVING, Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.routing.reported_status import ReportedStatus
from torchmoor.run.async_parts import make_async_inference
from torchmoor.run.listening import listening_on
from torchmoor.run.processes.child_process import ChildProcess
from torchmoor.run.processes.limits import divide, part_of_body_bytes
from torchmoor.run.processes.link import ChildAssignment, Message, describe, to_text
from torchmoor.run.processes.totals import Totals, VariantTotal

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 1.0  # for a report or for decisions; after it the child's last report counts


class ProcessGroup:
    """Runs one data plane in `listen.processes` children, until the exit stack passed to `start` is closed."""

    def __init__(self, settings: ProxySettings, registry: Registry, suspect: Callable[[Instance], None]) -> None:
        """suspect: called with an instance that seems to be dead, so that it is probed at once.

        Raises ConfigError if a certificate cannot be used, or if the settings need one process.
        """
        check_settings(settings)
        make_tls(settings.listen.tls_certificate, settings.listen.tls_key)  # each child reads it: fail early here
        self.registry = registry
        self.port = settings.listen.port
        self.children: list[ChildProcess] = []
        self.operations = HandlerOperations()
        self._totals = Totals(registry)
        self.async_inference = make_async_inference(settings, registry, lambda: self._totals.variants, None)
        self._settings = settings
        self._suspect = suspect
        self._statuses: dict[str, Message] = {}  # the last of each instance, for children that start later
        self._commands: dict[Callable[..., None], str] = {}  # the last call of each command, for the same
        self._sender: ChildProcess | None = None  # the child whose message is being sent to the others
        self._reports: dict[int, asyncio.Event] = {}
        self._decisions: dict[int, asyncio.Future[dict[str, Any]]] = {}  # of the newest round of queries
        self._num_rounds = 0
        self._wake: Callable[[], None] | None = None
        for endpoint in registry.endpoints():
            for variant in endpoint.variants:
                if variant.models is not None:
                    variant.models.on_expected = self._on_expected
        registry.listen(self._on_change)

    # The proxy's life

    async def start(self, stack: AsyncExitStack) -> None:
        """Reserve the port. Raises ConfigError if it is taken."""
        listen, number = self._settings.listen, self._settings.listen.processes
        with listening_on(listen.runtime_url(listen.port)):
            sockets, self.port = reserve(listen.host, listen.port)
        for each in sockets:
            stack.callback(each.close)
        settings = divide(self._settings, number)
        for index in range(number):
            assignment = ChildAssignment(settings, self.port, index, logging.getLogger().getEffectiveLevel())
            self.children.append(ChildProcess(assignment, self))
            self._reports[index] = asyncio.Event()
        await stack.enter_async_context(self.operations)
        if self.async_inference is not None:
            await stack.enter_async_context(self.async_inference)

    async def listen(self, stack: AsyncExitStack) -> None:
        """Start the children and wait until all take connections. Raises LaunchError if one cannot."""
        stack.push_async_callback(self._stop_children)
        for child in self.children:
            child.start()
        await asyncio.gather(*(child.first_start for child in self.children))

    async def _stop_children(self) -> None:
        await asyncio.gather(*(child.stop() for child in self.children))

    def carry_out(self, command: Callable[[ProcessParts, *Values], None], *values: *Values) -> None:
        """Carry out an operator's command in every child, also in those that start later."""
        call = self._commands[command] = to_text((command, values))
        self._send_all("command", call=call)

    def tick(self) -> None:
        """Do nothing: each child advances its own breakers and shares."""

    def on_need(self, wake: Callable[[], None]) -> None:
        """Register a callback for when a request, in any child, waits for an instance to be started."""
        self._wake = wake

    # Numbers

    def traffic(self) -> list[VariantTotal]:
        """Return each variant's numbers, as of the last `refresh`."""
        return self._totals.variants

    def counts(self) -> ProcessCounts:
        """Return the numbers that belong to no variant, as of the last `refresh`."""
        return self._totals.counts

    def is_idle(self, instance: Instance) -> bool:
        """Return True if no child uses an instance or has requests outstanding there, by their last reports."""
        return not self._totals.is_in_use(instance.name)

    async def refresh(self) -> None:
        """Ask every child for its numbers, and add them up."""
        asked = [child for child in self.children if child.is_ready]
        for child in asked:
            self._reports[child.index].clear()
            child.send("report")
        await _wait_for([self._reports[child.index].wait() for child in asked])
        self._totals.compute()

    async def find_decisions(self, query: DecisionQuery) -> dict[str, Any]:
        """Return the decisions of all children that answer in time."""
        asked = [child for child in self.children if child.is_ready]
        self._decisions = {child.index: asyncio.get_running_loop().create_future() for child in asked}
        self._num_rounds += 1
        for child in asked:
            child.send("decisions", round=self._num_rounds, query=asdict(query))
        answers = list(self._decisions.values())
        await _wait_for(answers)
        found = [answer.result() for answer in answers if not answer.cancelled()]
        return join_decisions(found, query.limit)

    # To the children

    def _send_all(self, kind: str, *, but: ChildProcess | None = None, **members: object) -> None:
        for child in self.children:
            if child is not but:
                child.send(kind, **members)

    def _on_change(self, instance: Instance) -> None:
        is_known = self.registry.has(instance)
        if not is_known or not instance.is_ready:
            self._statuses.pop(instance.name, None)
        if is_known:
            self._send_all("instance", **self._describe(instance))
        else:
            self._send_all("removed", name=instance.name)

    def _describe(self, instance: Instance) -> Message:
        num_bytes = part_of_body_bytes(instance, self._settings)
        return {
            "facts": describe(instance) | {"max_inflight_body_bytes": num_bytes},
            "state": instance.state.value,
            "batches_sequences": instance.batches_sequences,
            "is_drained": instance.is_drained,
            "is_resumable": instance.is_resumable,
            "last_start_s": self.registry.variant_of(instance).last_start_s,
        }

    def on_asked(self, instance: Instance) -> None:
        """Announce a status query: its answer will not include what a child notes from now on."""
        self._send_all("asked", name=instance.name)

    def on_status(self, instance: Instance, status: ReportedStatus) -> None:
        """Forward an instance's answer to a status query."""
        message = self._statuses[instance.name] = {"name": instance.name, "status": to_text(status)}
        self._send_all("status", **message)

    def _on_expected(self, model: str, name: str) -> None:
        """Tell the other children that an instance will load a model, so that they send requests for it there."""
        self._send_all("expecting", but=self._sender, model=model, name=name)

    # From the children

    def on_started(self, child: ChildProcess) -> None:
        """Send a new child every instance, open breaker, status and command."""
        instances = self.registry.instances()
        for instance in instances:
            child.send("instance", **self._describe(instance))
        for instance in instances:  # now the child knows how many may be cut off
            if instance.breaker.state is BreakerState.OPEN:
                child.send("breaker", name=instance.name, is_open=True)
        for status in self._statuses.values():
            child.send("status", **status)
        for call in self._commands.values():
            child.send("command", call=call)

    def on_message(self, child: ChildProcess, message: Message) -> None:
        """Handle a child's message, and send the other children what concerns them."""
        match message["kind"]:
            case "report":
                self._take_report(child, message["report"])
            case "decisions":
                answer = self._decisions.get(child.index)
                if answer is not None and not answer.done() and message["round"] == self._num_rounds:
                    answer.set_result(message["found"])
            case "waiting":
                if self._wake is not None:
                    self._wake()
            case _:
                instance = self.registry.find(message["name"])
                if instance is not None:
                    self._on_instance_message(child, instance, message)

    def _on_instance_message(self, child: ChildProcess, instance: Instance, message: Message) -> None:
        match message["kind"]:
            case "down":
                if instance.state in SERVING and instance.port == message["port"]:
                    self.registry.set_state(instance.name, InstanceState.DOWN)
            case "suspect":
                self._suspect(instance)
            case "expecting":
                models = self.registry.variant_of(instance).models
                if models is not None and instance.is_ready:
                    self._sender = child
                    models.expect(message["model"], instance.name)
                    self._sender = None
            case "breaker":
                self._send_all("breaker", but=child, name=instance.name, is_open=message["is_open"])

    def _take_report(self, child: ChildProcess, report: Message) -> None:
        self._totals.take(child.index, report)
        self._totals.show_instances()
        self._reports[child.index].set()
        for endpoint, name in report["needs_status"]:
            variant = self.registry.get_endpoint(endpoint).find_variant(name)
            if variant is not None:
                variant.needs_status = True

    def on_ended(self, child: ChildProcess) -> None:
        """Keep the counters of a child that has ended; its outstanding requests are gone."""
        self._totals.end(child.index)
        self._totals.show_instances()
        answer = self._decisions.get(child.index)
        if answer is not None:
            answer.cancel()
        self._reports[child.index].set()


def check_settings(settings: ProxySettings) -> None:
    """Raise ConfigError if several processes cannot run here, or cannot do what the settings ask for."""
    if os.uname().sysname != "Linux":
        raise ConfigError("listen.processes must be 1 here: only Linux spreads connections over several processes")
    late = [endpoint.name for endpoint in settings.endpoints if endpoint.late_binding is not None]
    if late:
        raise ConfigError(
            f"late binding needs one proxy process, because each process has its own queue: set listen.processes "
            f"(--processes) to 1, or turn late binding off for {', '.join(late)}"
        )
    if settings.container.serves_models:
        raise ConfigError("listen.processes must be 1 where a platform loads models: one process knows which")
    if settings.container.shows_metrics:
        raise ConfigError("listen.processes must be 1 with container.shows_metrics: the admin plane has the metrics")


async def _wait_for(waits: Sequence[Awaitable[Any]]) -> None:
    """Wait for all of these, at most ANSWER_TIMEOUT_S; cancel those that take longer."""
    if waits:
        _, late = await asyncio.wait([asyncio.ensure_future(wait) for wait in waits], timeout=ANSWER_TIMEOUT_S)
        for wait in late:
            wait.cancel()


def reserve(host: str, port: int) -> tuple[list[socket.socket], int]:
    """Bind sockets that do not listen, to reserve a port (0 for any); return them and the port.

    Raises OSError if another program uses the port, even one that would share it.
    """
    with ExitStack() as stack:
        bound = []
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            if port:
                with _make(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((address[0], port, *address[2:]))
            own = stack.enter_context(_make(family, kind, protocol))
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            own.bind((address[0], port, *address[2:]))
            port = own.getsockname()[1]
            bound.append(own)
        stack.pop_all()
        return bound, port


def _make(family: int, kind: int, protocol: int) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as asyncio's servers do
    return made
