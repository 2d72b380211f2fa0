"""Launcher that starts TorchServe instances on this host, restarts those that die, and stops them.

An instance keeps its name through restarts, so that session ids stay valid. The launcher adds each instance to the
registry; the health checker decides whether it is ready.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import BinaryIO

from torchmoor.config.body_heap import inflight_body_bytes
from torchmoor.config.launcher import DEFAULT_CAPACITY, DEFAULT_START_TIMEOUT_S
from torchmoor.errors import LaunchError
from torchmoor.fleet import instance_guard
from torchmoor.fleet.archive_checks import check_archives
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
from torchmoor.tasks import cancel_all, in_thread
from torchmoor.wire.progress import INTERVAL_S

logger = logging.getLogger(__name__)

POLL_S = 0.1
MAX_BACKOFF_S = 30.0  # before a restart
STABLE_AFTER_S = 300.0  # an instance that ran for longer restarts after min_backoff_s
MAX_TAKEN = 3  # starts that find a port taken and are repeated at once with other ports
LOCK_GRACE_S = 10.0  # for an earlier fleet in the same directory to end, beyond its instances' kill_after_s


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


class Launcher:
    """Runs this host's instances within its context. report: shows a message to the operator.

    It has the run directory to itself from `lock`, or the first start, to the end.
    """

    def __init__(
        self,
        settings: InstanceProcessSettings,
        registry: Registry,
        environment: Mapping[str, str],
        report: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._environment = dict(environment)
        self._report = report
        self._starting = asyncio.Semaphore(settings.max_starting)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._ends: dict[str, InstanceEnd] = {}  # the last of each instance
        self._is_stopping = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lock = RunLock(settings.run_dir, timeout_s=settings.kill_after_s + LOCK_GRACE_S)

    async def __aenter__(self) -> Launcher:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def lock(self) -> None:
        """Lock the run directory; wait for an earlier fleet to end. Raises LaunchError if it does not."""
        await self._lock.take(self._report)

    async def start(self, launches: Sequence[Launch]) -> None:
        """Start instances and wait until all are ready. Raises LaunchError if one fails."""
        self.check(launches)
        await asyncio.gather(*[self.begin(launch) for launch in launches])

    def check(self, launches: Sequence[Launch]) -> None:
        """Raise LaunchError for an archive that cannot be served; warn of handlers that are not those here."""
        check_archives(self._settings.torchserve.model_store, launches)

    def is_running(self, name: str) -> bool:
        """Return whether the instance has a process, ready or not. False between two restarts."""
        process = self._processes.get(name)
        return process is not None and process.returncode is None

    def begin(self, launch: Launch) -> asyncio.Future[None]:
        """Start an instance, and restart it until `end`. It must not run already.

        The future is done when the instance is first ready. If it raises LaunchError, no process runs, but the instance
        stays registered until `end`.
        """
        assert launch.name not in self._tasks
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._tasks[launch.name] = asyncio.create_task(self._keep_running(launch, first))
        task.add_done_callback(lambda ended: _settle(first, ended, launch.name))
        return first

    async def end(self, name: str) -> None:
        """Stop an instance, if it is known: remove it from routing, end its processes and delete its folder."""
        task = self._tasks.get(name)
        if task is None:
            return
        task.cancel()
        if self._registry.find(name) is not None:
            self._registry.dismiss(name)
        await asyncio.gather(task, return_exceptions=True)
        if self._registry.find(name) is not None:  # added meanwhile
            self._registry.dismiss(name)
        await self._stop(name)
        await in_thread(remove_folder, self._folder(name))
        del self._tasks[name]
        self._ends.pop(name, None)

    async def stop(self) -> None:
        """Stop every instance, delete its folder, and unlock the run directory."""
        self._is_stopping = True
        await cancel_all(self._tasks.values())
        await asyncio.gather(*(self._stop(name) for name in list(self._processes)))
        if not self._lock.is_held:  # the directory is another fleet's
            return
        for name in [*self._tasks, *instance_guard.REMOVED_WITH_FLEET]:
            await in_thread(remove_folder, self._folder(name))
        self._lock.release()
        with suppress(OSError):
            self._settings.run_dir.rmdir()

    def kill(self) -> None:
        """Kill every instance with SIGKILL, and restart none."""
        self._is_stopping = True
        for process in self._processes.values():
            _kill_group(process)

    async def _keep_running(self, launch: Launch, first: asyncio.Future[None]) -> None:
        """Keep one instance running. `first` gets the result of its first start; later failures are retried."""
        spec = self._plan(launch)
        fixed = spec.ports
        backoff_s = self._settings.min_backoff_s
        num_taken = 0  # starts in a row that found a port taken
        while not self._is_stopping:
            began = asyncio.get_running_loop().time()
            try:
                async with AsyncExitStack() as slot:
                    await slot.enter_async_context(self._starting)
                    spec = self._with_free_ports(spec, fixed)
                    await self._start(spec)
                    await self._until_ready(spec, slot)
                num_taken = 0
                if not first.done():
                    first.set_result(None)
                reason = await self._until_broken(spec)
            except Exception as error:
                is_expected = isinstance(error, (LaunchError, OSError))
                await self._stop(spec.name)
                if num_taken < MAX_TAKEN and has_met_taken_port(spec) and all(is_free(port) for port in fixed):
                    num_taken += 1
                    self._report(f"{spec.name} found one of its ports taken; starting it again with others")
                    continue
                if not first.done():
                    if not is_expected:
                        raise  # `_settle` then sets the error of `first`
                    first.set_exception(LaunchError(_describe(error, spec)))
                    return
                reason = _describe(error, spec)
                logger.error(
                    "instance failed instance=%s error=%s", spec.name, error, exc_info=None if is_expected else error
                )
            if self._is_stopping:
                return
            end = await self._note_end(spec, reason)
            if asyncio.get_running_loop().time() - began > STABLE_AFTER_S:
                backoff_s = self._settings.min_backoff_s
            self._report(f"{spec.name} {end.reason}; starting it again in {backoff_s:.0f} s; {quote_lines(end.log)}")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _note_end(self, spec: InstanceSpec, reason: str) -> InstanceEnd:
        end = self._ends[spec.name] = await in_thread(read_end, spec, reason)
        if (instance := self._registry.find(spec.name)) is not None:
            instance.last_end = end
            self._registry.set_state(spec.name, InstanceState.DOWN)
        return end

    def _folder(self, name: str) -> Path:
        return self._settings.run_dir / name

    def _plan(self, launch: Launch) -> InstanceSpec:
        given = {each.name: getattr(launch, each.name) for each in fields(Launch)}
        start_timeout_s = max(launch.start_timeout_s, self._settings.start_timeout_s)
        environment = {**self._environment, **launch.environment}
        return InstanceSpec(
            **{**given, "start_timeout_s": start_timeout_s, "environment": environment},
            folder=self._folder(launch.name),
            ports=() if launch.port is None else (launch.port,),
        )

    def _with_free_ports(self, spec: InstanceSpec, fixed: tuple[int, ...]) -> InstanceSpec:
        """Choose free ports. Previous ports are used again if they are free, so that other parts keep them."""
        if len(spec.ports) == PORTS_PER_INSTANCE and all(is_free(port) for port in spec.ports):
            return spec
        free = find_free_ports(PORTS_PER_INSTANCE - len(fixed), among=self._settings.ports)
        return dataclasses.replace(spec, ports=(*fixed, *free))

    async def _start(self, spec: InstanceSpec) -> None:
        lock = await self._lock.take(self._report)
        if spec.log_file.is_file():  # keeps the previous start's log
            spec.log_file.replace(spec.log_file.with_suffix(".previous.log"))
        settings = self._settings.torchserve
        await asyncio.to_thread(remove_unpacked, spec)
        command = prepare(spec, settings)
        if spec.contents is not None:
            await asyncio.to_thread(write_archive, spec.contents, spec.model, spec.own_store / spec.archive)
        self._report(f"{spec.name} starting")
        with _console(spec, settings) as console:
            self._processes[spec.name] = await asyncio.create_subprocess_exec(
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
        self._registry.add(
            Instance(
                name=spec.name,
                endpoint=spec.endpoint,
                variant=spec.variant,
                generation=spec.generation,
                model=spec.model,
                port=spec.ports[0],
                management_port=spec.ports[1],
                metrics_port=spec.ports[2],
                capacity=self._settings.capacity,
                takes_operations=spec.contents is not None
                or takes_operations((spec.store or settings.model_store) / spec.archive),
                max_inflight_body_bytes=inflight_body_bytes(self._settings.torchserve.heap_mib),
                started_at=time.monotonic(),
                last_end=self._ends.get(spec.name),
                gpu=spec.gpu,
            )
        )

    async def _until_ready(self, spec: InstanceSpec, slot: AsyncExitStack) -> None:
        """Wait until the instance is ready; close the slot after slot_s.

        Raises LaunchError, with the log's end, if it dies or is too slow.
        """
        instance = self._registry.find(spec.name)
        assert instance is not None  # just added
        variant = self._registry.variant_of(instance)
        last_s = variant.last_start_s
        usual = "" if last_s is None else f" (the last start took {last_s:.1f} s)"
        interval_s, loop = self._settings.progress_interval_s, asyncio.get_running_loop()
        began = reported = loop.time()
        while self._state(spec.name) not in (InstanceState.READY, InstanceState.DRAINING):
            await asyncio.sleep(POLL_S)
            now = loop.time()
            if now - began > self._settings.slot_s:
                await slot.aclose()
            if (status := self._processes[spec.name].returncode) is not None:
                raise LaunchError(f"{spec.name} ended while starting: it {describe_exit(status)}; {quote_log(spec)}")
            if (failure := await asyncio.to_thread(find_load_failure, spec)) is not None:  # the log may be long
                raise LaunchError(f"{spec.name} cannot load its model: {failure}{self._advise(spec, failure)}")
            if now - began > spec.start_timeout_s:
                raise LaunchError(f"{spec.name} was not ready after {spec.start_timeout_s:.0f} s; {quote_log(spec)}")
            if 0 < interval_s <= now - reported:
                reported = now
                progress = await asyncio.to_thread(find_progress, spec)
                self._report(f"{spec.name} {progress}, {now - began:.0f} s{usual}")
        variant.last_start_s = loop.time() - began
        if (instance := self._registry.find(spec.name)) is not None:
            self._registry.refresh(instance)  # so that other processes learn it
        self._report(f"{spec.name} ready after {variant.last_start_s:.1f} s")

    def _advise(self, spec: InstanceSpec, failure: str) -> str:
        """Return what to do about a missing module, if the archive has requirements that are not installed."""
        settings = self._settings.torchserve
        if "ModuleNotFoundError" not in failure or spec.contents is not None:
            return ""
        properties = {**settings.properties, **spec.properties}
        requirements = find_requirements((spec.store or settings.model_store) / spec.archive)
        if not requirements or properties.get("install_py_dep_per_model") == "true":
            return ""
        return f"; install the archive's {requirements} into the environment of {settings.python}"

    async def _until_broken(self, spec: InstanceSpec) -> str:
        """Wait until the process has ended or was down for longer than down_timeout_s; return the reason."""
        loop = asyncio.get_running_loop()
        last_up = loop.time()
        while self._processes[spec.name].returncode is None:
            await asyncio.sleep(POLL_S)
            if self._state(spec.name) is not InstanceState.DOWN:
                last_up = loop.time()
            elif loop.time() - last_up > self._settings.down_timeout_s:
                await self._stop(spec.name)
                return f"did not answer for {self._settings.down_timeout_s:.0f} s and was stopped"
        process = self._processes.pop(spec.name)
        _kill_group(process)  # in case the guard was killed
        return describe_exit(process.returncode or 0)

    def _state(self, name: str) -> InstanceState | None:
        instance = self._registry.find(name)
        return None if instance is None else instance.state

    async def _stop(self, name: str) -> None:
        """Close the guard's pipe and wait; SIGKILL if that does not help. Safe to repeat after a cancellation."""
        process = self._processes.get(name)
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
            logger.error("instance killed instance=%s", name)
            _kill_group(process)
            await process.wait()
        self._processes.pop(name, None)


def _describe(error: Exception, spec: InstanceSpec) -> str:
    """Return why an instance failed; of an error of the operating system, also where, such as on which full disk."""
    if isinstance(error, OSError):
        return f"{spec.name} could not be started: {error.strerror or error}: {error.filename or spec.folder}"
    return str(error)


def _console(spec: InstanceSpec, settings: TorchServeSettings) -> AbstractContextManager[BinaryIO | None]:
    """Open the file for TorchServe's output outside its log; None: inherit our standard output."""
    if settings.logs_to_console:
        return nullcontext()
    spec.console_file.unlink(missing_ok=True)
    return spec.console_file.open("ab")


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _settle(first: asyncio.Future[None], ended: asyncio.Task[None], name: str) -> None:
    """End the wait for an instance whose task has ended before it was ready."""
    if first.done():
        return
    error = None if ended.cancelled() else ended.exception()
    if error is None:
        first.cancel()
    else:
        first.set_exception(LaunchError(f"{name} could not be started: {error}"))
