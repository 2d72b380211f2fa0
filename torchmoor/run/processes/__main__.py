"""The entry point of a child process of the proxy.

    python -m torchmoor.run.processes DESCRIPTOR LOG_LEVEL

DESCRIPTOR is the socket to the parent.
"""

from __future__ import annotations

import sys
from importlib import import_module

from torchmoor.run.hangups import ignore_hangups


def main(arguments: list[str]) -> None:
    """Run the process: DESCRIPTOR LOG_LEVEL."""
    ignore_hangups()  # before the imports, which take a second; the parent handles SIGHUP and sends messages
    child = import_module("torchmoor.run.processes.child")
    descriptor, log_level = map(int, arguments)
    child.serve(descriptor, log_level)


if __name__ == "__main__":
    main(sys.argv[1:])
