"""The program of the process that renders chat templates.

Started as a script by `handlers.models.template_process`, with both limits as arguments. Each line of standard input is
a request, the keyword arguments of transformers' `render_jinja_template` as JSON; each line of standard output is an
answer: {"text"}, {"refused": the template's reason} or {"failed": the kind of error}. Beyond a limit it just ends.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer requests until standard input ends."""
    cpu_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what a library prints
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template  # without torch

    limit_memory(memory_bytes)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process, also within one long operation
        try:
            rendered: Any = render_jinja_template(**json.loads(line))
            answer = {"text": rendered[0][0]}  # of one conversation; the rest is for training
        except TemplateError as exc:
            answer = {"refused": str(exc)[:200]}
        except MemoryError:
            return
        except Exception as exc:  # a template may do anything with its messages
            answer = {"failed": type(exc).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory(num_bytes: int) -> None:
    """Let the process take this much more memory than now. Does nothing where the system does not tell its size."""
    statistics = Path("/proc/self/statm")
    if statistics.is_file():
        size = int(statistics.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    main()
