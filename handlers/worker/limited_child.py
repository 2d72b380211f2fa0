"""The program of a limited process: renders chat templates or compiles grammars.

Started as a script by `limited_process.py`, with the kind of work and both limits as arguments. The first line of
standard output is "ready". After it, each line of standard input is a request and each line of standard output its
answer, both as JSON. Beyond a limit it just ends.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
STATISTICS = Path("/proc/self/statm")


def main() -> None:
    """Answer requests until standard input ends."""
    work, cpu_s, memory_bytes = WORK[sys.argv[1]], float(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that a library's prints do not become answers
    answer = work()
    limit_memory(memory_bytes)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process, also within one long operation
        try:
            found = json.dumps(answer(json.loads(line)))
        except MemoryError:
            return
        signal.setitimer(signal.ITIMER_PROF, 0)  # before the answer: the next request would get the signal's blame
        answers.write(found + "\n")
        answers.flush()


def render_templates() -> Callable[[Answer], Answer]:
    """Render chat templates.

    Request: keyword arguments of transformers' `render_jinja_template`, or {"compiled": a template}. Answer: {"text"},
    empty for a template that was only compiled, {"refused": the template's reason} or {"failed": the kind of error}.
    """
    from jinja2.exceptions import TemplateError

    for package in ("transformers", "transformers.utils"):
        skip_own_code(package)
    from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

    def render(request: Answer) -> Answer:
        try:
            if request.keys() == {"compiled"}:  # a request may have a variable of this name
                _compile_jinja_template(request["compiled"])
                return {"text": ""}
            rendered: Any = render_jinja_template(**request)
        except TemplateError as exc:
            return {"refused": str(exc)[:200]}
        except MemoryError:
            raise
        except Exception as exc:  # a template may do anything with its messages
            return {"failed": type(exc).__name__}
        return {"text": rendered[0][0]}  # of one conversation; the rest is for training

    return render


def skip_own_code(package: str) -> None:
    """Let a package's modules be imported without its own code, which takes a second for transformers.

    That code reads the sources of all models and imports clients of the Hugging Face Hub.
    """
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    sys.modules[package] = module_from_spec(spec)


def try_grammars() -> Callable[[Answer], Answer]:
    """Compile grammars for a vocabulary of bytes, which takes the time and memory that any vocabulary takes.

    Request: {"grammar": in llguidance's form, "limits": keyword arguments of LLParserLimits}. Answer: {"num_bytes":
    the memory of the compiled grammar} or {"refused": the library's reason}.
    """
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokenizer = LLTokenizer("byte")

    def compile_one(request: Answer) -> Answer:
        before = used_bytes()
        matcher = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=LLParserLimits(**request["limits"]))
        if not matcher.is_error():
            matcher.compute_bitmask()  # some limits are only noticed at the first token
        if matcher.is_error():
            return {"refused": matcher.get_error()}
        return {"num_bytes": max(0, used_bytes() - before)}

    return compile_one


def used_bytes() -> int:
    """Return the process's resident memory without what the heap has free; 0 where the system does not report it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return int(STATISTICS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATISTICS.is_file() else 0


def limit_memory(num_bytes: int) -> None:
    """Let the process take this much more memory than now. Does nothing where the system does not report its size."""
    if STATISTICS.is_file():
        size = int(STATISTICS.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


WORK: dict[str, Callable[[], Callable[[Answer], Answer]]] = {"template": render_templates, "grammar": try_grammars}

if __name__ == "__main__":
    main()
