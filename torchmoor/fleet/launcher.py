"""Launcher that starts TorchServe instances on this host, restarts those that die, and stops them.

An instance keeps its name through restarts, so that session ids stay valid. The launcher adds each instance to the
registry; the health checker decides whether it is ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from torchmoor.fleet import instance_guard
from torchmoor.fleet.archive_checks import check_archives
from torchmoor.fleet.folder_removal import remove_folder
from torchmoor.fleet.instance_process import InstanceProcess, InstanceProcessSettings, LaunchContext
from torchmoor.fleet.run_lock import RunLock
from torchmoor.fleet.torchserve import Launch
from torchmoor.proxy.instances.registry import Registry
from torchmoor.tasks import cancel_all, in_thread

LOCK_GRACE_S = 10.0  # for an earlier fleet in the same directory to end, beyond its instances' kill_after_s


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
        self._report = report
        self._lock = RunLock(settings.run_dir, timeout_s=settings.kill_after_s + LOCK_GRACE_S)
        starting = asyncio.Semaphore(settings.max_starting)
        self._context = LaunchContext(settings, registry, dict(environment), report, self._lock, starting)
        self._processes: dict[str, InstanceProcess] = {}  # by the instance's name

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
        return process is not None and process.is_running

    def begin(self, launch: Launch) -> asyncio.Future[None]:
        """Start an instance, and restart it until `end`. It must not run already. Return its `ready`."""
        assert launch.name not in self._processes
        process = self._processes[launch.name] = InstanceProcess(self._context, launch)
        return process.ready

    async def end(self, name: str) -> None:
        """Stop an instance, if it is known: remove it from routing, end its processes and delete its folder."""
        process = self._processes.get(name)
        if process is not None:
            await process.end()
            del self._processes[name]

    async def stop(self) -> None:
        """Stop every instance, delete its folder, and unlock the run directory."""
        self._context.is_stopping = True
        processes = list(self._processes.values())
        await cancel_all(process.task for process in processes)
        await asyncio.gather(*(process.stop() for process in processes))
        if not self._lock.is_held:  # the directory is another fleet's
            return
        for process in processes:
            await process.remove_folder()
        for name in instance_guard.REMOVED_WITH_FLEET:
            await in_thread(remove_folder, self._settings.run_dir / name)
        self._lock.release()
        with suppress(OSError):
            self._settings.run_dir.rmdir()

    def kill(self) -> None:
        """Kill every instance with SIGKILL, and restart none."""
        self._context.is_stopping = True
        for process in self._processes.values():
            process.kill()
