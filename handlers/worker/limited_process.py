"""A process that does untrusted work (chat templates, grammars) within limits of time and memory.

A chat template or a grammar can compute forever or fill the memory, even within a single operation. A thread cannot be
ended then, but a process can; the next request gets a new process.
"""

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from handlers.errors import InternalError

logger = logging.getLogger(__name__)

DEADLINE_S = 60.0  # wall-clock limit, for a process that hangs without using CPU time
CHILD = Path(__file__).with_name("limited_child.py")
READY = b"ready\n"
ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TZ")  # nothing secret


class WorkTooCostly(Exception):
    """Raised if the work exceeds its limit of time or memory; the message has the limits."""


class LimitedProcess:
    """Does one kind of work, one request at a time. Any thread. Starts its process when it is needed.

    cpu_s: processor time of one request. memory_bytes: limit beyond what the process itself needs.
    """

    def __init__(self, work: Literal["template", "grammar"], cpu_s: float, memory_bytes: int) -> None:
        self._work = work
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it runs; it takes up to a second until it answers. Raises InternalError."""
        with self._lock:
            self._running()

    def stop(self) -> None:
        """End the process. A later request starts another."""
        with self._lock:
            self._end()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, both of the forms in limited_child.py.

        Raises WorkTooCostly, or InternalError with the reason if the process cannot be started.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            return self._exchange(line)

    def _exchange(self, line: bytes) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        is_late = False

        def kill() -> None:
            nonlocal is_late
            is_late = True
            process.kill()

        timer = threading.Timer(DEADLINE_S, kill)
        timer.daemon = True
        timer.start()
        found = b""
        try:
            self._is_ready = self._is_ready or process.stdout.readline() == READY
            if not self._is_ready:
                raise self._not_started(f"it ended with status {process.wait()}")
            process.stdin.write(line)
            process.stdin.flush()
            found = process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
            timer.join()  # it may be killing the process just now
            is_whole = found.endswith(b"\n")  # a process can end in the middle of its answer
            if is_late or not is_whole:
                self._end()
        if not is_whole:
            raise WorkTooCostly(f"it needs more than {self._cpu_s:g} s or {self._memory_bytes >> 20} MiB")
        answer: dict[str, Any] = json.loads(found)
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            command = [sys.executable, "-P", str(CHILD), self._work, str(self._cpu_s), str(self._memory_bytes)]
            own = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
            environment = {**own, "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
            pipe = subprocess.PIPE
            try:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
            except OSError as exc:
                raise self._not_started(exc.strerror or str(exc)) from exc
            self._is_ready = False
            atexit.register(self.stop)
        return self._process

    def _not_started(self, reason: str) -> InternalError:
        logger.error("limited process not started work=%s reason=%s", self._work, reason)
        return InternalError(f"the process for a {self._work} could not be started: {reason}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        atexit.unregister(self.stop)
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it holds a request that the process has not read
            process.stdin.close()
        process.stdout.close()
