"""The process of one TorchServe instance on this host: it is started, restarted when it dies, and stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import BinaryIO

from torchmoor.config.body_heap import inflight_body_bytes
from torchmoor.config.launcher import DEFAULT_CAPACITY, DEFAULT_START_TIMEOUT_S
from torchmoor.errors import LaunchError
from torchmoor.fleet import instance_guard
from torchmoor.fleet.archives import find_requirements, takes_operations, write_archive
from torchmoor.fleet.folder_removal import remove_folder
from torchmoor.fleet.instance_log import (
    describe_exit,
    find_load_failure,
    find_progress,
    has_met_taken_port,
    quote_lines,
    quote_log,
    read_end,
)
from torchmoor.fleet.ports import USUAL, find_free_ports, is_free
from torchmoor.fleet.processors import available_processors
from torchmoor.fleet.run_lock import RunLock
from torchmoor.fleet.torchserve import (
    PORTS_PER_INSTANCE,
    InstanceSpec,
    Launch,
    TorchServeSettings,
    environment,
    prepare,
    remove_unpacked,
)
from torchmoor.proxy.instances.instance import Instance, InstanceEnd, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.tasks import in_thread
from torchmoor.wire.progress import INTERVAL_S

logger = logging.getLogger(__name__)

POLL_S = 0.1
MAX_BACKOFF_S = 30.0  # before a restart
STABLE_AFTER_S = 300.0  # an instance that ran for longer restarts after min_backoff_s
MAX_TAKEN = 3  # starts that find a port taken and are repeated at once with other ports


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceProcessSettings:
    """How the processes of instances are started, watched, stopped and restarted."""

    torchserve: TorchServeSettings
    run_dir: Path  # parent of the instances' folders and of their shared journal
    capacity: int = DEFAULT_CAPACITY  # requests that an instance gets at a time
    start_timeout_s: float = DEFAULT_START_TIMEOUT_S
    progress_interval_s: float = INTERVAL_S  # between lines about a start; 0: no lines
    down_timeout_s: float = 90.0  # an instance that is down for longer is restarted
    kill_after_s: float = 10.0  # from SIGTERM to SIGKILL
    min_backoff_s: float = 1.0  # before a restart; doubled each time
    # At once: a start is bound by the CPU.
    max_starting: int = field(default_factory=lambda: max(1, int(available_processors() / 2)))
    slot_s: float = 60.0  # then a start leaves its place to others: it downloads or reads its model
    ports: range = USUAL  # for instances


@dataclass(slots=True)
class LaunchContext:
    """What all instances of a launcher share. starting: limits the starts at a time. is_stopping: none is restarted."""

    settings: InstanceProcessSettings
    registry: Registry
    environment: Mapping[str, str]
    report: Callable[[str], None]
    lock: RunLock
    starting: asyncio.Semaphore
    is_stopping: bool = False


class InstanceProcess:
    """Runs one instance, and restarts it until `end`. It keeps its name, and its ports if they stay free.

    ready: done when the instance is first ready. If it raises LaunchError, no process runs, but the instance stays
    registered until `end`.
    """

    def __init__(self, context: LaunchContext, launch: Launch) -> None:
        self._context = context
        self._settings = context.settings
        self._registry = context.registry
        self._spec = _plan(launch, context)
        self._fixed_ports = self._spec.ports
        self._process: asyncio.subprocess.Process | None = None
        self._last_end: InstanceEnd | None = None
        self._num_taken = 0  # starts in a row that found a port taken
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._keep_running())
        self.task.add_done_callback(self._settle)

    @property
    def is_running(self) -> bool:
        """True if there is a process, ready or not. False between two restarts."""
        return self._process is not None and self._process.returncode is None

    async def end(self) -> None:
        """Remove the instance from routing, end its processes and delete its folder."""
        self.task.cancel()
        self._dismiss()
        await asyncio.gather(self.task, return_exceptions=True)
        self._dismiss()  # added meanwhile
        await self.stop()
        await self.remove_folder()

    def _dismiss(self) -> None:
        if self._find() is not None:
            self._registry.dismiss(self._spec.name)

    async def stop(self) -> None:
        """Close the guard's pipe and wait; SIGKILL if that does not help. Safe to repeat after a cancellation."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError, RuntimeError):  # uvloop: the guard is dead
            process.stdin.write(b"s")
        process.stdin.close()
        try:  # not wait_for: Python 3.11's can lose a cancellation
            async with asyncio.timeout(self._settings.kill_after_s + 5):
                await process.wait()
        except TimeoutError:
            logger.error("instance killed instance=%s", self._spec.name)
            _kill_group(process)
            await process.wait()
        self._process = None

    async def remove_folder(self) -> None:
        await in_thread(remove_folder, self._spec.folder)

    def kill(self) -> None:
        """Kill the instance with SIGKILL."""
        if self._process is not None:
            _kill_group(self._process)

    async def _keep_running(self) -> None:
        """Start the instance again whenever it ends, until its first start fails or the launcher stops."""
        loop, backoff_s = asyncio.get_running_loop(), self._settings.min_backoff_s
        while not self._context.is_stopping:
            began = loop.time()
            try:
                await self._start_until_ready()
                reason = await self._until_broken()
            except Exception as error:
                is_expected = isinstance(error, (LaunchError, OSError))
                await self.stop()
                if self._try_other_ports():
                    continue
                if not self.ready.done():
                    if not is_expected:
                        raise  # `_settle` then sets the error of `ready`
                    self.ready.set_exception(LaunchError(self._describe(error)))
                    return
                reason = self._describe(error)
                exc_info = None if is_expected else error
                logger.error("instance failed instance=%s error=%s", self._spec.name, error, exc_info=exc_info)
            if self._context.is_stopping:
                return
            end = await self._note_end(reason)
            if loop.time() - began > STABLE_AFTER_S:
                backoff_s = self._settings.min_backoff_s
            self._report(f"{end.reason}; starting it again in {backoff_s:.0f} s; {quote_lines(end.log)}")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _settle(self, ended: asyncio.Task[None]) -> None:
        """End the wait for an instance whose task has ended before it was ready."""
        if self.ready.done():
            return
        error = None if ended.cancelled() else ended.exception()
        if error is None:
            self.ready.cancel()
        else:
            self.ready.set_exception(LaunchError(f"{self._spec.name} could not be started: {error}"))

    def _report(self, line: str) -> None:
        self._context.report(f"{self._spec.name} {line}")

    def _describe(self, error: Exception) -> str:
        """Return why the instance failed; of an error of the operating system, also where, such as on a full disk."""
        if isinstance(error, OSError):
            where = error.filename or self._spec.folder
            return f"{self._spec.name} could not be started: {error.strerror or error}: {where}"
        return str(error)

    async def _note_end(self, reason: str) -> InstanceEnd:
        end = self._last_end = await in_thread(read_end, self._spec, reason)
        if (instance := self._find()) is not None:
            instance.last_end = end
            self._registry.set_state(instance.name, InstanceState.DOWN)
        return end

    def _find(self) -> Instance | None:
        return self._registry.find(self._spec.name)

    # Ports

    def _choose_ports(self) -> None:
        """Choose free ports. Previous ports are used again if they are free, so that other parts keep them."""
        ports = self._spec.ports
        if len(ports) == PORTS_PER_INSTANCE and all(is_free(port) for port in ports):
            return
        free = find_free_ports(PORTS_PER_INSTANCE - len(self._fixed_ports), among=self._settings.ports)
        self._spec = dataclasses.replace(self._spec, ports=(*self._fixed_ports, *free))

    def _try_other_ports(self) -> bool:
        """Return whether a start failed only because another program took one of its ports, and may be repeated."""
        if self._num_taken == MAX_TAKEN or not has_met_taken_port(self._spec):
            return False
        if not all(is_free(port) for port in self._fixed_ports):
            return False
        self._num_taken += 1
        self._report("found one of its ports taken; starting it again with others")
        return True

    # A start and its end

    async def _start_until_ready(self) -> None:
        async with AsyncExitStack() as slot:
            await slot.enter_async_context(self._context.starting)
            self._choose_ports()
            await self._start()
            await self._until_ready(slot)
        self._num_taken = 0
        if not self.ready.done():
            self.ready.set_result(None)

    async def _start(self) -> None:
        spec, settings = self._spec, self._settings.torchserve
        lock = await self._context.lock.take(self._context.report)
        if spec.log_file.is_file():  # keeps the previous start's log
            spec.log_file.replace(spec.log_file.with_suffix(".previous.log"))
        await asyncio.to_thread(remove_unpacked, spec)
        command = prepare(spec, settings)
        if spec.contents is not None:
            await asyncio.to_thread(write_archive, spec.contents, spec.model, spec.own_store / spec.archive)
        self._report("starting")
        with _console(spec, settings) as console:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", instance_guard.__file__, str(spec.folder), str(spec.pid_file)),
                *(str(self._settings.kill_after_s), *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=console,  # None: inherit ours
                stderr=asyncio.subprocess.STDOUT,
                cwd=spec.folder / "work",
                env=environment(spec, settings),
                start_new_session=True,
                pass_fds=(lock,),
            )
        self._registry.add(self._make_instance())

    def _make_instance(self) -> Instance:
        """Return the record of the process that was started, for the registry."""
        spec, settings = self._spec, self._settings.torchserve
        archive = (spec.store or settings.model_store) / spec.archive
        return Instance(
            name=spec.name,
            endpoint=spec.endpoint,
            variant=spec.variant,
            generation=spec.generation,
            model=spec.model,
            port=spec.ports[0],
            management_port=spec.ports[1],
            metrics_port=spec.ports[2],
            capacity=self._settings.capacity,
            takes_operations=spec.contents is not None or takes_operations(archive),
            max_inflight_body_bytes=inflight_body_bytes(settings.heap_mib),
            started_at=time.monotonic(),
            last_end=self._last_end,
            gpu=spec.gpu,
        )

    async def _until_ready(self, slot: AsyncExitStack) -> None:
        """Wait until the instance is ready; close the slot after slot_s.

        Raises LaunchError, with the log's end, if it dies or is too slow.
        """
        spec, instance, process = self._spec, self._find(), self._process
        assert instance is not None  # just added
        assert process is not None
        variant = self._registry.variant_of(instance)
        last_s = variant.last_start_s
        usual = "" if last_s is None else f" (the last start took {last_s:.1f} s)"
        interval_s, loop = self._settings.progress_interval_s, asyncio.get_running_loop()
        began = reported = loop.time()
        while self._state() not in (InstanceState.READY, InstanceState.DRAINING):
            await asyncio.sleep(POLL_S)
            now = loop.time()
            if now - began > self._settings.slot_s:
                await slot.aclose()
            if process.returncode is not None:
                end = describe_exit(process.returncode)
                raise LaunchError(f"{spec.name} ended while starting: it {end}; {quote_log(spec)}")
            if (failure := await asyncio.to_thread(find_load_failure, spec)) is not None:  # the log may be long
                raise LaunchError(f"{spec.name} cannot load its model: {failure}{self._advise(failure)}")
            if now - began > spec.start_timeout_s:
                raise LaunchError(f"{spec.name} was not ready after {spec.start_timeout_s:.0f} s; {quote_log(spec)}")
            if 0 < interval_s <= now - reported:
                reported = now
                progress = await asyncio.to_thread(find_progress, spec)
                self._report(f"{progress}, {now - began:.0f} s{usual}")
        variant.last_start_s = loop.time() - began
        if (instance := self._find()) is not None:
            self._registry.refresh(instance)  # so that other processes learn it
        self._report(f"ready after {variant.last_start_s:.1f} s")

    def _advise(self, failure: str) -> str:
        """Return what to do about a missing module, if the archive has requirements that are not installed."""
        spec, settings = self._spec, self._settings.torchserve
        if "ModuleNotFoundError" not in failure or spec.contents is not None:
            return ""
        properties = {**settings.properties, **spec.properties}
        requirements = find_requirements((spec.store or settings.model_store) / spec.archive)
        if not requirements or properties.get("install_py_dep_per_model") == "true":
            return ""
        return f"; install the archive's {requirements} into the environment of {settings.python}"

    async def _until_broken(self) -> str:
        """Wait until the process has ended or was down for longer than down_timeout_s; return the reason."""
        process, loop = self._process, asyncio.get_running_loop()
        assert process is not None
        last_up = loop.time()
        while process.returncode is None:
            await asyncio.sleep(POLL_S)
            if self._state() is not InstanceState.DOWN:
                last_up = loop.time()
            elif loop.time() - last_up > self._settings.down_timeout_s:
                await self.stop()
                return f"did not answer for {self._settings.down_timeout_s:.0f} s and was stopped"
        self._process = None
        _kill_group(process)  # in case the guard was killed
        return describe_exit(process.returncode)

    def _state(self) -> InstanceState | None:
        instance = self._find()
        return None if instance is None else instance.state


def _plan(launch: Launch, context: LaunchContext) -> InstanceSpec:
    given = {each.name: getattr(launch, each.name) for each in fields(Launch)}
    start_timeout_s = max(launch.start_timeout_s, context.settings.start_timeout_s)
    environment = {**context.environment, **launch.environment}
    return InstanceSpec(
        **{**given, "start_timeout_s": start_timeout_s, "environment": environment},
        folder=context.settings.run_dir / launch.name,
        ports=() if launch.port is None else (launch.port,),
    )


def _console(spec: InstanceSpec, settings: TorchServeSettings) -> AbstractContextManager[BinaryIO | None]:
    """Open the file for TorchServe's output outside its log; None: inherit our standard output."""
    if settings.logs_to_console:
        return nullcontext()
    spec.console_file.unlink(missing_ok=True)
    return spec.console_file.open("ab")


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
