"""Starts TorchServe instances on this host, restarts those that die, and stops one or all of them.

An instance keeps its name through restarts, so that session ids go on pointing to it. The registry learns of each
instance here; whether it is ready is the health checker's to say.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from torchmoor.config.launcher import DEFAULT_CAPACITY
from torchmoor.config.routing import ALL_TRAFFIC
from torchmoor.errors import LaunchError
from torchmoor.fleet import supervisor
from torchmoor.fleet.ports import USUAL, find_free_ports, is_free
from torchmoor.fleet.run_lock import RunLock
from torchmoor.fleet.torchserve import (
    LOOPBACK,
    PORTS_PER_INSTANCE,
    InstanceSpec,
    TorchServeSettings,
    environment,
    find_load_failure,
    prepare,
)
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry

logger = logging.getLogger(__name__)

POLL_S = 0.1
PROGRESS_INTERVAL_S = 5.0
NUM_LOG_LINES = 15
LOCK_GRACE_S = 10.0  # of an earlier fleet in the same directory, beyond what its supervisors give their instances
NUM_REMOVERS = 8  # threads that delete what an instance leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSettings:
    """How instances are started, watched and stopped."""

    torchserve: TorchServeSettings
    run_dir: Path  # where the instances' folders go, and the journal that they share
    start_timeout_s: float = 180.0  # from the start of an instance to its model being ready
    down_timeout_s: float = 90.0  # an instance that is down for longer is restarted as a whole
    stop_grace_s: float = 10.0
    capacity: int = DEFAULT_CAPACITY  # requests that the proxy sends to an instance at a time
    min_backoff_s: float = 1.0  # before a dead instance is started again; doubled each time
    max_backoff_s: float = 30.0
    stable_after_s: float = 300.0  # an instance that ran for so long starts with the shortest back-off again
    max_starting: int = max(1, (os.cpu_count() or 1) // 2)  # at a time: a start is bound by the CPU
    ports: range = USUAL  # that instances may have


@dataclass(frozen=True, slots=True)
class Launch:
    """One instance that shall run."""

    name: str
    endpoint: str
    archive: str
    gpu: str | None = None  # as CUDA_VISIBLE_DEVICES names it
    variant: str = ALL_TRAFFIC
    host: str = LOOPBACK  # the address of its inference port
    port: int | None = None  # that port; None: any free one


class Launcher:
    """The instances of this host, for as long as the context lasts.

    report: told of each change an operator would want to see, in a few words.
    """

    def __init__(
        self,
        settings: LauncherSettings,
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
        self._is_stopping = False
        self._supervisors: dict[str, asyncio.Task[None]] = {}
        self._lock = RunLock(settings.run_dir, timeout_s=settings.stop_grace_s + LOCK_GRACE_S)

    async def __aenter__(self) -> Launcher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, launches: Sequence[Launch]) -> None:
        """Start all and wait until each is ready. Raises LaunchError at the first that does not come up."""
        self.check(launches)
        await asyncio.gather(*[self.begin(launch) for launch in launches])

    def check(self, launches: Sequence[Launch]) -> None:
        """Raise LaunchError unless there is an archive for each."""
        check_archives(self._settings.torchserve.model_store, launches)

    def is_running(self, name: str) -> bool:
        """True while there is a TorchServe of that name, whatever state it is in; not between two of its lives."""
        process = self._processes.get(name)
        return process is not None and process.returncode is None

    def begin(self, launch: Launch) -> asyncio.Future[None]:
        """Have an instance run from now on, until `end`; its name is one that does not run.

        The future is done when the instance is ready for the first time; or it raises LaunchError, and then nothing
        runs, though the instance is known until `end`.
        """
        assert launch.name not in self._supervisors
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        supervisor = asyncio.create_task(self._supervise(launch, first))
        supervisor.add_done_callback(lambda _: first.cancel())
        self._supervisors[launch.name] = supervisor
        return first

    async def end(self, name: str) -> None:
        """Stop an instance for good; nothing is sent there from now on, and nothing of it is left afterwards."""
        supervisor = self._supervisors[name]
        supervisor.cancel()
        if self._registry.find(name) is not None:
            self._registry.dismiss(name)
        await asyncio.gather(supervisor, return_exceptions=True)
        if self._registry.find(name) is not None:  # it was just being added
            self._registry.dismiss(name)
        await self._stop(name)
        await asyncio.to_thread(_remove, self._folder(name))
        del self._supervisors[name]

    async def stop(self) -> None:
        """Stop every instance and wait until nothing of it is left."""
        self._is_stopping = True
        for task in self._supervisors.values():
            task.cancel()
        await asyncio.gather(*self._supervisors.values(), return_exceptions=True)
        await asyncio.gather(*(self._stop(name) for name in list(self._processes)))
        for name in [*self._supervisors, supervisor.JOURNAL_FOLDER]:
            await asyncio.to_thread(_remove, self._folder(name))
        self._lock.release()
        with suppress(OSError):
            self._settings.run_dir.rmdir()

    def kill(self) -> None:
        """Stop at once, with SIGKILL; nothing is started again."""
        self._is_stopping = True
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    async def _supervise(self, launch: Launch, first: asyncio.Future[None]) -> None:
        """Keep one instance running. The first start's outcome goes to `first`; later failures are tried again."""
        spec = self._plan(launch)
        fixed = spec.ports
        backoff_s = self._settings.min_backoff_s
        while not self._is_stopping:
            began = asyncio.get_running_loop().time()
            try:
                spec = self._with_free_ports(spec, fixed)
                async with self._starting:
                    await self._start(spec)
                    await self._until_ready(spec)
                if not first.done():
                    first.set_result(None)
                await self._until_broken(spec)
            except (LaunchError, OSError) as error:
                await self._stop(spec.name)
                if not first.done():
                    first.set_exception(error if isinstance(error, LaunchError) else LaunchError(str(error)))
                    return
                logger.error("instance failed instance=%s error=%s", spec.name, error)
            if self._is_stopping:
                return
            if self._state(spec.name) is not None:
                self._registry.set_state(spec.name, InstanceState.DOWN)
            if asyncio.get_running_loop().time() - began > self._settings.stable_after_s:
                backoff_s = self._settings.min_backoff_s
            self._report(f"{spec.name} has ended; starting it again in {backoff_s:.0f} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._settings.max_backoff_s)

    def _folder(self, name: str) -> Path:
        return self._settings.run_dir / name

    def _plan(self, launch: Launch) -> InstanceSpec:
        return InstanceSpec(
            name=launch.name,
            endpoint=launch.endpoint,
            variant=launch.variant,
            archive=launch.archive,
            folder=self._folder(launch.name),
            ports=() if launch.port is None else (launch.port,),
            gpu=launch.gpu,
            host=launch.host,
            environment=self._environment,
        )

    def _with_free_ports(self, spec: InstanceSpec, fixed: tuple[int, ...]) -> InstanceSpec:
        """The same ports as before if they are free, so that nothing else has to learn new ones."""
        if len(spec.ports) == PORTS_PER_INSTANCE and all(is_free(port) for port in spec.ports):
            return spec
        free = find_free_ports(PORTS_PER_INSTANCE - len(fixed), among=self._settings.ports)
        return dataclasses.replace(spec, ports=(*fixed, *free))

    async def _start(self, spec: InstanceSpec) -> None:
        lock = await self._lock.take(self._report)
        if spec.log_file.is_file():  # a new one for this start; the last one's stays to be read
            spec.log_file.replace(spec.log_file.with_suffix(".previous.log"))
        settings = self._settings.torchserve
        command = prepare(spec, settings)
        self._report(f"{spec.name} starting")
        with _console(spec, settings) as console:
            self._processes[spec.name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", supervisor.__file__, str(spec.folder), str(spec.pid_file)),
                *(str(self._settings.stop_grace_s), *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=console,  # None: our own
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
                model=spec.model,
                port=spec.ports[0],
                management_port=spec.ports[1],
                metrics_port=spec.ports[2],
                capacity=self._settings.capacity,
                started_at=time.monotonic(),
            )
        )

    async def _until_ready(self, spec: InstanceSpec) -> None:
        """Raises LaunchError, with the end of the log, if the instance dies or takes too long."""
        variant = self._registry.get_endpoint(spec.endpoint).find_variant(spec.variant)
        assert variant is not None  # the instance was added to it
        last_s = variant.last_start_s
        usual = "" if last_s is None else f" (the last start took {last_s:.1f} s)"
        loop = asyncio.get_running_loop()
        began = reported = loop.time()
        while self._state(spec.name) not in (InstanceState.READY, InstanceState.DRAINING):
            await asyncio.sleep(POLL_S)
            now = loop.time()
            if self._processes[spec.name].returncode is not None:
                raise LaunchError(f"{spec.name} ended while starting; {_log_tail(spec)}")
            if (failure := find_load_failure(spec)) is not None:
                raise LaunchError(f"{spec.name} cannot load its model: {failure}")
            if now - began > self._settings.start_timeout_s:
                raise LaunchError(
                    f"{spec.name} was not ready after {self._settings.start_timeout_s:.0f} s; {_log_tail(spec)}"
                )
            if now - reported >= PROGRESS_INTERVAL_S:
                reported = now
                self._report(f"{spec.name} loading its model, {now - began:.0f} s{usual}")
        variant.last_start_s = loop.time() - began
        if (instance := self._registry.find(spec.name)) is not None:
            self._registry.refresh(instance)  # so that other processes hear of it
        self._report(f"{spec.name} ready after {variant.last_start_s:.1f} s")

    async def _until_broken(self, spec: InstanceSpec) -> None:
        """Returns when the process has ended, or has been down for so long that it will not mend itself."""
        loop = asyncio.get_running_loop()
        last_up = loop.time()
        while self._processes[spec.name].returncode is None:
            await asyncio.sleep(POLL_S)
            if self._state(spec.name) is not InstanceState.DOWN:
                last_up = loop.time()
            elif loop.time() - last_up > self._settings.down_timeout_s:
                await self._stop(spec.name)
                return
        process = self._processes.pop(spec.name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the supervisor has seen to that, unless it was killed itself

    def _state(self, name: str) -> InstanceState | None:
        instance = self._registry.find(name)
        return None if instance is None else instance.state

    async def _stop(self, name: str) -> None:
        """Close the supervisor's pipe and wait for it; SIGKILL if even that does not help. Whoever is cancelled in this
        leaves it to be done again."""
        process = self._processes.get(name)
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError, RuntimeError):  # uvloop: the pipe of a supervisor that is dead already
            process.stdin.write(b"s")
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), self._settings.stop_grace_s + 5)
        except TimeoutError:
            logger.error("instance killed instance=%s", name)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        self._processes.pop(name, None)


def _console(spec: InstanceSpec, settings: TorchServeSettings) -> AbstractContextManager[BinaryIO | None]:
    """Where what TorchServe writes before and beside its log goes; None: to our own standard output."""
    return nullcontext() if settings.logs_to_console else (spec.folder / "console.log").open("ab")


def check_archives(model_store: Path, launches: Sequence[Launch]) -> None:
    """Raise LaunchError unless there is an archive for each."""
    for launch in launches:
        if not (model_store / launch.archive).exists():
            raise LaunchError(f"there is no {launch.archive} in {model_store}; build it with make archives")


def _remove(folder: Path) -> None:
    """A folder with all that is in it, or as much of it as can be removed.

    What lies in it goes several at a time: the disk lets each deletion of a file that was made durable wait, so that
    the journals of a thousand sessions took ten seconds one after the other.
    """
    with suppress(OSError), ThreadPoolExecutor(NUM_REMOVERS) as removers:
        for path in folder.iterdir():
            removers.submit(shutil.rmtree, path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _log_tail(spec: InstanceSpec) -> str:
    """The last lines of what the instance wrote, for an error's message."""
    for path in (spec.log_file, spec.folder / "console.log"):
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        if lines:
            return "the end of its log:\n" + "\n".join(lines[-NUM_LOG_LINES:])
    return "it wrote no log"
