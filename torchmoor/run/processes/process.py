"""One proxy process as its parent sees it: started, listened to, told things, and started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from torchmoor.config.access import Credentials
from torchmoor.errors import LaunchError
from torchmoor.run.data_plane import ERRAND_GRACE_S
from torchmoor.run.processes.link import Assignment, Link, Message, to_text

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
SILENT_S = 30.0  # a process that has said nothing for so long hangs; it reports once a second
WATCH_S = 1.0
MIN_BACKOFF_S = 0.5  # before a dead process is started again; doubled each time
MAX_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0  # one that ran for so long starts with the shortest back-off again
STOP_SPARE_S = ERRAND_GRACE_S + 4.0  # to end in, beyond the grace of its requests


class Listener(Protocol):
    """Who hears what becomes of a process."""

    def on_started(self, process: Process) -> None:
        """It runs, and knows nothing yet."""
        ...

    def on_message(self, process: Process, message: Message) -> None:
        """It has said something; `ready` and `failed` are not passed on."""
        ...

    def on_ended(self, process: Process) -> None:
        """It is gone, with all that it was doing."""
        ...


class Process:
    """The process of one row, through all its lives."""

    def __init__(self, assignment: Assignment, listener: Listener) -> None:
        self.row = assignment.row
        self.is_ready = False
        self._assignment = assignment
        self._listener = listener
        self._link: Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._heard_at = 0.0
        self._failure: str | None = None
        self._is_stopping = False
        self._supervisor: asyncio.Task[None] | None = None
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        """Of its present life."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Keep it running from now on; `first` is done when it takes requests, or cannot."""
        self._supervisor = asyncio.create_task(self._supervise())

    def send(self, kind: str, **members: object) -> None:
        """Tell it something, if it runs."""
        if self._link is not None:
            self._link.send(kind, **members)

    def take_credentials(self, credentials: Credentials) -> None:
        """Let it, and who comes after it, judge requests by these."""
        settings = self._assignment.settings.replace(credentials=credentials)
        self._assignment = replace(self._assignment, settings=settings)
        self.send("credentials", credentials=to_text(credentials))

    async def stop(self) -> None:
        """Let what it does end, and end it."""
        self._is_stopping = True
        self.send("stop")
        process, grace_s = self._process, self._assignment.settings.timeouts.stop_grace_s
        if process is not None:
            try:
                await asyncio.wait_for(process.wait(), grace_s + STOP_SPARE_S)
            except TimeoutError:
                logger.error("proxy process killed row=%d pid=%d", self.row, process.pid)
                _kill(process)
        if self._supervisor is not None:
            if process is None:
                self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = MIN_BACKOFF_S
        while not self._is_stopping:
            began = loop.time()
            try:
                await self._live()
            except OSError as error:
                self._failure = str(error)
            except Exception:  # whatever one process says must not end the care for it
                logger.exception("proxy process misunderstood row=%d", self.row)
            if not self.first.done():
                self.first.set_exception(LaunchError(self._failure or "a proxy process ended while starting"))
                return
            if self._is_stopping:
                return
            if loop.time() - began > STABLE_AFTER_S:
                backoff_s = MIN_BACKOFF_S
            logger.error(
                "proxy process ended row=%d again_in_s=%.1f error=%s", self.row, backoff_s, self._failure or "none told"
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _live(self) -> None:
        """From its start to its end."""
        own, others = socket.socketpair()
        own.setblocking(False)
        assignment = self._assignment
        with others:
            process = self._process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "torchmoor.run.processes.replica",
                    str(others.fileno()),
                    str(assignment.log_level),
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(others.fileno(), assignment.counts, *assignment.wakers),
                start_new_session=True,  # what is typed at a terminal is the parent's to hear
            )
        link = self._link = await Link.open(own)
        self._failure = None
        self._heard_at = asyncio.get_running_loop().time()
        watching = asyncio.create_task(self._watch(process, link))
        try:
            link.send("assign", assignment=to_text(self._assignment))  # credentials may have changed meanwhile
            self._listener.on_started(self)
            link.send("listen")
            if self._is_stopping:
                link.send("stop")
            async for message in link.receive():
                self._hear(message)
            await self._end(process)
        finally:
            watching.cancel()
            _kill(process)
            await process.wait()
            link.close()
            self._link = self._process = None
            self.is_ready = False
            self._listener.on_ended(self)

    def _hear(self, message: Message) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        if message["kind"] == "ready":
            self.is_ready = True
            if not self.first.done():
                self.first.set_result(None)
        elif message["kind"] == "failed":
            self._failure = str(message["error"])
        else:
            self._listener.on_message(self, message)

    @staticmethod
    async def _end(process: asyncio.subprocess.Process) -> None:
        """It has closed its end, so it is dead, or will be at once."""
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), WATCH_S)

    async def _watch(self, process: asyncio.subprocess.Process, link: Link) -> None:
        """Kill it when it hangs."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_S)
            silent_s = loop.time() - self._heard_at
            if silent_s > (SILENT_S if self.is_ready else START_TIMEOUT_S) or link.is_clogged:
                self._failure = f"it said nothing for {silent_s:.0f} s"
                _kill(process)
                return


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
