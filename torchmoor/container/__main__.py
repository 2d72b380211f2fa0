"""The image's entry point: its first argument is the role.

serve        everything in one container, as SageMaker wants it (torchmoor.container.serve)
instance     one TorchServe, for Kubernetes (torchmoor.container.instance)
proxy ...    the front proxy: torchmoor serve ...
anything else is a command of torchmoor's, such as `bench`
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import uvloop

from torchmoor.container import instance, serve
from torchmoor.container.environment import ContainerEnvironment, read_environment
from torchmoor.errors import TorchmoorError

ROLES = {"serve": serve.run, "instance": instance.run}


def main(arguments: list[str]) -> int:
    """The exit status: 0 after a SIGTERM, 1 if it cannot go on, and then the last line says why."""
    role, *rest = arguments or ["serve"]
    if role not in ROLES or rest:
        command = ["serve", *rest] if role == "proxy" else [role, *rest]
        torchmoor = Path(sys.executable).with_name("torchmoor")
        os.execv(torchmoor, [str(torchmoor), *command])
    try:
        told = read_environment(os.environ)
        _log(told)
        uvloop.run(ROLES[role](told, _report))
    except TorchmoorError as error:
        _report(f"error: {error}")
        return 1
    except OSError as error:
        _report(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return 1
    return 0


def _log(told: ContainerEnvironment) -> None:
    """Where SageMaker and Kubernetes collect it from."""
    logging.basicConfig(
        level=told.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )


def _report(line: str) -> None:
    print(f"torchmoor: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
