"""The parent's supervision of one child process: starts it, watches it, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from contextlib import suppress
from typing import Protocol

from torchmoor.errors import LaunchError
from torchmoor.run.data_plane import SUBREQUEST_GRACE_S
from torchmoor.run.processes.link import ChildAssignment, Link, Message, to_text

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
SILENT_S = 30.0  # a child that sends nothing for this long hangs; it reports once per second
WATCH_S = 1.0
MIN_BACKOFF_S = 0.5  # before a dead child is started again; doubled each time
MAX_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0  # a child that ran for this long is restarted with the shortest back-off
STOP_SPARE_S = SUBREQUEST_GRACE_S + 4.0  # for its end, after the grace of its requests


class ChildListener(Protocol):
    """Receives the events of a child process."""

    def on_started(self, child: ChildProcess) -> None:
        """The child runs and does not know any instance yet."""

    def on_message(self, child: ChildProcess, message: Message) -> None:
        """The child has sent a message other than `ready` and `failed`."""

    def on_ended(self, child: ChildProcess) -> None:
        """The child is gone, with all its requests."""


class ChildProcess:
    """Keeps the child of one index running. first_start: done when the first child takes requests, or cannot."""

    def __init__(self, assignment: ChildAssignment, listener: ChildListener) -> None:
        self.index = assignment.index
        self.is_ready = False
        self.first_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._assignment = assignment
        self._listener = listener
        self._link: Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._silent_s = 0.0
        self._failure: str | None = None
        self._is_stopping = False
        self._running: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The running process's id."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the child, and start it again whenever it ends."""
        self._running = asyncio.create_task(self._keep_running())

    def send(self, kind: str, **members: object) -> None:
        """Send a message if the child runs."""
        if self._link is not None:
            self._link.send(kind, **members)

    async def stop(self) -> None:
        """Let running requests end, then end the child."""
        self._is_stopping = True
        self.send("stop")
        process, grace_s = self._process, self._assignment.settings.timeouts.stop_grace_s
        if process is not None:
            try:
                await asyncio.wait_for(process.wait(), grace_s + STOP_SPARE_S)
            except TimeoutError:
                logger.error("proxy process killed index=%d pid=%d", self.index, process.pid)
                _kill(process)
        if self._running is not None:
            if process is None:
                self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = MIN_BACKOFF_S
        while not self._is_stopping:
            began = loop.time()
            try:
                await self._run()
            except OSError as error:
                self._failure = str(error)
            except Exception:  # a bad message from one child must not end the supervision
                logger.exception("proxy process misunderstood index=%d", self.index)
            if not self.first_start.done():
                self.first_start.set_exception(LaunchError(self._failure or "a proxy process ended while starting"))
                return
            if self._is_stopping:
                return
            if loop.time() - began > STABLE_AFTER_S:
                backoff_s = MIN_BACKOFF_S
            logger.error(
                "proxy process ended index=%d restart_in_s=%.1f error=%s",
                self.index,
                backoff_s,
                self._failure or "unknown",
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _run(self) -> None:
        """Start the child and handle its messages until it ends."""
        own, others = socket.socketpair()
        own.setblocking(False)
        module, log_level = "torchmoor.run.processes", str(self._assignment.log_level)
        with others:
            process = self._process = await asyncio.create_subprocess_exec(
                # Without the working directory, which may have a file with the name of a module.
                *(sys.executable, "-P", "-m", module, str(others.fileno()), log_level),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(others.fileno(),),
                start_new_session=True,  # signals from a terminal go to the parent alone
            )
        link = self._link = await Link.open(own)
        self._failure = None
        self._silent_s = 0.0
        watching = asyncio.create_task(self._watch(process, link))
        try:
            link.send("assign", assignment=to_text(self._assignment))
            self._listener.on_started(self)
            link.send("listen")
            if self._is_stopping:
                link.send("stop")
            async for message in link.receive():
                self._on_message(message)
            with suppress(TimeoutError):  # the child has closed its end, so it is dead or ends at once
                await asyncio.wait_for(process.wait(), WATCH_S)
        finally:
            watching.cancel()
            _kill(process)
            await process.wait()
            link.close()
            self._link = self._process = None
            self.is_ready = False
            self._listener.on_ended(self)

    def _on_message(self, message: Message) -> None:
        self._silent_s = 0.0
        if message["kind"] == "ready":
            self.is_ready = True
            if not self.first_start.done():
                self.first_start.set_result(None)
        elif message["kind"] == "failed":
            self._failure = str(message["error"])
        else:
            self._listener.on_message(self, message)

    async def _watch(self, process: asyncio.subprocess.Process, link: Link) -> None:
        """Kill the child when it hangs."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._silent_s += WATCH_S  # not by the clock: while this process is held up, it hears no child
            if link.is_clogged:
                self._failure = "it does not read its messages"
            elif self._silent_s > (SILENT_S if self.is_ready else START_TIMEOUT_S):
                self._failure = f"it said nothing for {self._silent_s:.0f} s"
            else:
                continue
            _kill(process)
            return


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
