"""The log of a program on standard error, where systemd, Kubernetes and SageMaker collect it."""

from __future__ import annotations

import logging
import sys


def start_log(level: int | str, *, names_process: bool = False) -> None:
    """Log from a level on. names_process: each line has the process's id."""
    process = "[%(process)d]" if names_process else ""
    form = f"%(asctime)s %(levelname)s %(name)s{process} %(message)s"
    logging.basicConfig(level=level, stream=sys.stderr, format=form)
    # It warns of a certificate's host name at each attempt; the error of the attempt says the same.
    logging.getLogger("urllib3.connection").setLevel(logging.ERROR)
