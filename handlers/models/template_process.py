"""The worker's handle of the process that renders chat templates: starts, limits and ends it.

Checkpoints bring their templates, and a template can compute forever or fill the memory, even within a single
operation. A thread cannot be ended then, but a process can: its time and memory are limited, and the next request gets
a new one.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

CPU_S = 3.0
MEMORY_BYTES = 256 << 20
DEADLINE_S = 60.0  # wall-clock limit, for a process that hangs without using CPU time
CHILD = Path(__file__).with_name("template_child.py")
ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TZ")  # nothing secret


class TemplateFailed(Exception):
    """A template did not render; the message has the reason.

    is_refusal: the template itself refused the messages.
    """

    def __init__(self, reason: str, *, is_refusal: bool = False) -> None:
        super().__init__(reason)
        self.is_refusal = is_refusal


class TemplateProcess:
    """Renders templates, one at a time. Any thread. Starts its process when it is needed.

    cpu_s: processor time of one rendering. memory_bytes: limit beyond what the process itself needs.
    """

    def __init__(self, cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it runs; it takes about a second until it answers."""
        with self._lock:
            self._running()

    def stop(self) -> None:
        """End the process. A later rendering starts another."""
        with self._lock:
            self._end()

    def render(self, request: dict[str, Any]) -> str:
        """Return the rendered text. request: of `render_jinja_template`. Raises TemplateFailed."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            answer = self._exchange(line)
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise TemplateFailed(answer["refused"], is_refusal=True)
        raise TemplateFailed(f"it raised {answer['failed']}")

    def _exchange(self, line: bytes) -> dict[str, str]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(DEADLINE_S, process.kill)
        timer.daemon = True
        timer.start()
        found = b""
        try:
            process.stdin.write(line)
            process.stdin.flush()
            found = process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
            if not found:
                self._end()
        if not found:
            raise TemplateFailed(f"it needs more than {self._cpu_s:g} s or {self._memory_bytes >> 20} MiB")
        answer: dict[str, str] = json.loads(found)
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            command = [sys.executable, "-P", str(CHILD), str(self._cpu_s), str(self._memory_bytes)]
            own = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
            environment = {**own, "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
            atexit.register(self.stop)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        atexit.unregister(self.stop)
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()


SHARED = TemplateProcess()  # one per worker; one per model would cost 60 MB each
