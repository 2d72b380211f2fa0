"""Fuzz the HTTP parsers, guided by coverage: `make fuzz [SECONDS=60]`.

    python -m tests.fuzz requests [SECONDS] [libFuzzer's options]

TARGET is requests, answers or connections, the modules beside this one. The fuzzer starts with the inputs in
corpus/TARGET and keeps new ones in .fuzz/TARGET, which git ignores. It writes an input that breaks a rule to
.fuzz/TARGET-crash-...; add it to corpus/TARGET under a descriptive name, and `make test` replays it.
"""

import sys
from importlib import import_module
from pathlib import Path

import atheris

TARGETS = ("requests", "answers", "connections")
CORPUS = Path(__file__).parent / "corpus"
LEARNT = Path(".fuzz")


def main() -> None:
    name, seconds, *options = [*sys.argv[1:], "60"] if len(sys.argv) == 2 else sys.argv[1:] or ["", ""]
    if name not in TARGETS or not seconds.isdigit():
        raise SystemExit(f"say what to fuzz, of {', '.join(TARGETS)}, and for how many seconds")
    learnt = LEARNT / name
    learnt.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["torchmoor.proxy.http", "torchmoor.proxy.api"]):
        check = import_module(f"tests.fuzz.{name}").check
    options = [
        f"-max_total_time={seconds}",
        "-max_len=1500",
        "-timeout=10",
        f"-artifact_prefix={LEARNT}/{name}-",
        *options,
    ]
    atheris.Setup([sys.argv[0], *options, str(learnt), str(CORPUS / name)], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
