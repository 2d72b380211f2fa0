"""The image's entry point, whose first argument is the role.

serve        everything in one container, as SageMaker expects it (torchmoor.container.serve)
instance     one TorchServe, for Kubernetes (torchmoor.container.instance)
proxy ...    the front proxy: torchmoor serve ...
anything else: a command of torchmoor, such as `bench`
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import uvloop

from torchmoor.container.environment import read_environment
from torchmoor.errors import TorchmoorError, VariableInvalid
from torchmoor.run.hangups import ignore_hangups
from torchmoor.run.listening import AddressUnusable
from torchmoor.run.log import report, start_log

ROLES = ("serve", "instance")  # modules of this package


def main(arguments: list[str]) -> int:
    """Run a role and return the exit status: 0 after a SIGTERM, 2 for a wrong variable, 1 after another error.

    The last line describes the error.
    """
    if region := os.environ.get("AWS_REGION"):  # set by SageMaker; boto3 reads only the other one
        os.environ.setdefault("AWS_DEFAULT_REGION", region)
    role, *rest = arguments or ["serve"]
    if role not in ROLES or rest:
        command = ["serve", *rest] if role == "proxy" else [role, *rest]
        torchmoor = Path(sys.executable).with_name("torchmoor")
        os.execv(torchmoor, [str(torchmoor), *command])
    ignore_hangups()  # before the role is imported, which takes a second
    run = import_module(f"torchmoor.container.{role}").run
    try:
        environment = read_environment(os.environ)
        start_log(environment.log_level)
        uvloop.run(run(environment, report))
    except AddressUnusable as error:
        report(f"error: {error.problem}; set SAGEMAKER_BIND_TO_PORT or TORCHMOOR_ADMIN_PORT to another port")
        return 1
    except TorchmoorError as error:
        report(f"error: {error}")
        return 2 if isinstance(error, VariableInvalid) else 1
    except OSError as error:
        report(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
