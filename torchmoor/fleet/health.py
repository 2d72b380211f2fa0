"""Health checks: probes that decide whether an instance is ready.

TorchServe's /ping succeeds before the model is loaded and for minutes after a crash. So an instance is ready if `GET
/models/{model}` on its management port lists a READY worker; only an instance without a management port is probed by
/ping. A negative answer or a refused connection takes the instance down at once. Missing answers take it down after
`unanswered_before_down` in a row (HealthSettings), because moving an instance's sessions is expensive, and only if its
streams make no progress either. An answer that is missing because this process itself was held up does not count.

TorchServe lists a worker that hangs as READY. So an instance with our handler is also probed by its status operation,
which the worker answers under any load: silence means that it hangs. A handler that does not know the operation is
asked a few times; then only the other probes count.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from torchmoor.config.health import HealthSettings
from torchmoor.fault_log import FaultLog
from torchmoor.proxy.instances.instance import SERVING, Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.tasks import BackgroundTasks, cancel_all
from torchmoor.wire import headers, operations
from torchmoor.wire.connection_errors import shows_nothing

logger = logging.getLogger(__name__)

HELD_UP_S = 0.5  # of a round's delay; with less, a probe has time enough
WARNING_INTERVAL_S = 10.0  # between log lines of probes that are not sent

HEADERS = {headers.OPERATION: operations.STATUS, "Content-Type": "application/json"}
READ_BYTES = 4096  # of an answer
MAX_TRIES = 3  # of a handler that has never answered; each try costs it an invocation
MARK = b'"instance"'  # the first key of our handlers' status


@dataclass(slots=True)
class _Probed:
    """Results of one instance's probes. num_unanswered: in a row. num_pieces: of its streams, at the last probe."""

    next_at: float = 0.0
    was_asked: bool = False
    num_unanswered: int = 0
    num_pieces: int = 0
    worker: WorkerProbe | None = None


class HealthChecker:
    """Probes every registered instance: often while it is not ready or does not answer, otherwise seldom.

    on_tick: called in every round.
    """

    def __init__(self, registry: Registry, settings: HealthSettings, on_tick: Callable[[], None]) -> None:
        self._registry = registry
        self._settings = settings
        self._on_tick = on_tick
        self._probed: defaultdict[str, _Probed] = defaultdict(_Probed)  # by instance
        self._probes = BackgroundTasks()
        self._probing: set[str] = set()
        self._last_round = self._held_up_at = self._warns_after = 0.0
        self._loop_task: asyncio.Task[None] | None = None
        self._faults = FaultLog(logger)
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HealthChecker:
        timeout = aiohttp.ClientTimeout(total=self._settings.probe_timeout_s)
        # Each probe uses its own connection, because a kept one would reach the previous process. There is one probe
        # per instance and no other limit: otherwise silent instances would delay the probes of the others.
        self._client = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True, limit=0))
        self._loop_task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._loop_task is not None
        assert self._client is not None
        await cancel_all([self._loop_task])
        await self._probes.cancel()
        await self._client.close()

    @property
    def is_probing(self) -> bool:
        """Return whether a probe is in flight."""
        return bool(self._probing)

    def has_asked_all(self) -> bool:
        """Return whether a probe of every instance has been tried."""
        return all(self._probed[instance.name].was_asked for instance in self._registry.instances())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._last_round = loop.time()
        while True:
            self._look_for_delay()
            self._last_round = loop.time()
            self._try("a round of probes failed", partial(self.start_due_probes, self._last_round))
            self._try("breakers were not advanced", self._on_tick)
            await asyncio.sleep(self._settings.starting_interval_s)

    def _try(self, kind: str, act: Callable[[], None]) -> None:
        """Carry out a part of a round, and log a fault: without further rounds no instance comes back."""
        try:
            act()
        except Exception as error:
            self._faults.add(kind, error, has_trace=True)

    def _look_for_delay(self) -> None:
        """Note the time if the next round of probes is late, because this process was held up."""
        now = asyncio.get_running_loop().time()
        if now - self._last_round > self._settings.starting_interval_s + HELD_UP_S:
            self._held_up_at = now

    def start_due_probes(self, now: float) -> None:
        """Start a probe of each instance that is due and has none in flight."""
        instances = self._registry.instances()
        for gone in self._probed.keys() - {instance.name for instance in instances}:
            del self._probed[gone]
        for instance in instances:
            probed = self._probed[instance.name]
            if instance.state not in SERVING or probed.next_at <= now or probed.num_unanswered:
                probed.next_at = now + self._settings.ready_interval_s
                self._start_probe(instance)

    def suspect(self, instance: Instance) -> None:
        """Probe an instance now, because a request to it failed."""
        if instance.state in SERVING and self._client is not None:
            self._start_probe(instance)

    def _start_probe(self, instance: Instance) -> None:
        if instance.name in self._probing:
            return
        self._probing.add(instance.name)
        self._probes.start(self._probe(instance))

    async def _probe(self, instance: Instance) -> None:
        try:
            await self._ask_and_judge(instance)
        except Exception as error:  # the next probe may succeed
            self._faults.add("a probe failed", error, has_trace=True)

    async def _ask_and_judge(self, instance: Instance) -> None:
        began = asyncio.get_running_loop().time()
        try:
            is_ready = await self.ask(instance)
            if is_ready and self._registry.has(instance):
                is_ready = await self._ask_worker(instance)
        except OSError as error:
            self._note_unsent(instance, error)
            return
        finally:
            self._probing.discard(instance.name)
        if not self._registry.has(instance):
            return
        if is_ready is None and self._was_held_up_since(began):  # there may have been an answer
            return
        self._judge(instance, is_ready)

    def _note_unsent(self, instance: Instance, error: OSError) -> None:
        """Log a probe that was not sent, which says nothing about the instance."""
        self._probed[instance.name].was_asked = True  # else a name that DNS never resolves would keep us unready
        now = asyncio.get_running_loop().time()
        if now >= self._warns_after:
            self._warns_after = now + WARNING_INTERVAL_S
            logger.warning("probe not sent instance=%s error=%s", instance.name, error)

    def _was_held_up_since(self, began: float) -> bool:
        self._look_for_delay()
        return self._held_up_at >= began

    def _judge(self, instance: Instance, is_ready: bool | None) -> None:
        """Set the instance's state by a probe, or count it as unanswered (None)."""
        probed = self._probed[instance.name]
        unanswered = probed.num_unanswered + 1 if is_ready is None else 0
        if unanswered > 1 and instance.num_pieces != probed.num_pieces:
            unanswered = 1  # it streams: a busy instance is not a dead one
        probed.was_asked, probed.num_unanswered, probed.num_pieces = True, unanswered, instance.num_pieces
        if is_ready and instance.state not in SERVING:
            self._registry.set_state(instance.name, InstanceState.READY)
        elif instance.state in SERVING and (is_ready is False or unanswered >= self._settings.unanswered_before_down):
            self._registry.set_state(instance.name, InstanceState.DOWN)

    async def ask(self, instance: Instance) -> bool | None:
        """Probe once; return whether the instance is ready, None without an answer.

        Raises OSError if the probe is not sent, for lack of a descriptor, of a port, or of an answer by DNS.
        """
        assert self._client is not None
        try:
            if instance.management_port is None:
                async with self._client.get(f"{instance.url()}/ping") as answer:
                    return answer.status == 200
            url = f"{instance.url(instance.management_port)}/models/{instance.model}"
            async with self._client.get(url) as answer:
                if answer.status != 200:
                    return False
                models = _models_of(await answer.json(content_type=None))
            instance.batches_sequences = any(model.get("stateful") is True for model in models)
            return any(_has_ready_worker(model) for model in models)
        except aiohttp.ClientConnectorError as error:
            if shows_nothing(error):
                raise
            return False if isinstance(error.os_error, ConnectionRefusedError) else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
        except ValueError:
            return False

    async def _ask_worker(self, instance: Instance) -> bool | None:
        """Return None if the worker of our handler does not answer, otherwise True."""
        assert self._client is not None
        probed = self._probed[instance.name]
        if probed.worker is None or probed.worker.instance is not instance:
            probed.worker = WorkerProbe(instance, self._settings.worker_timeout_s)
        return True if await probed.worker.answers(self._client) else None


def _models_of(description: object) -> list[dict[str, Any]]:
    """Return the versions of a model in the management API's description."""
    return [each for each in description if isinstance(each, dict)] if isinstance(description, list) else []


def _has_ready_worker(model: dict[str, Any]) -> bool:
    return any(isinstance(worker, dict) and worker.get("status") == "READY" for worker in model.get("workers", ()))


class WorkerProbe:
    """Probes one instance's worker by its status operation (docs/instance-protocol.md)."""

    __slots__ = ("instance", "_timeout", "_knows", "_is_silent", "_num_tries")

    def __init__(self, instance: Instance, timeout_s: float) -> None:
        self.instance = instance
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._knows = False  # the handler has answered the operation before
        self._is_silent = False
        self._num_tries = 0

    async def answers(self, client: aiohttp.ClientSession) -> bool:
        """Return False if the worker has answered before and does not now. Never raises for an instance's failure.

        Raises OSError if the probe is not sent, for lack of a descriptor, of a port, or of an answer by DNS.
        """
        if not self.instance.can_be_operated:
            return True
        if not self._knows:
            if self._num_tries >= MAX_TRIES:
                return True
            self._num_tries += 1
        instance = self.instance
        url = f"{instance.url()}/predictions/{instance.model}"
        try:
            async with client.post(url, data=b"{}", headers=HEADERS, timeout=self._timeout) as answer:
                is_answered = answer.status == 200 and MARK in await _read_beginning(answer.content)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if isinstance(error, OSError) and shows_nothing(error):
                raise
            is_answered = False
        if is_answered:
            self._knows, self._is_silent = True, False
        elif self._knows:  # also if TorchServe refuses: its queue fills up when the worker hangs
            level = logging.INFO if self._is_silent else logging.WARNING
            logger.log(level, "worker does not answer instance=%s", instance.name)
            self._is_silent = True
        return is_answered or not self._knows


async def _read_beginning(content: aiohttp.StreamReader) -> bytes:
    """Read the beginning of a status, until MARK; the rest may be long."""
    received = b""
    async for piece in content.iter_any():
        received += piece
        if MARK in received or len(received) >= READ_BYTES:
            break
    return received
