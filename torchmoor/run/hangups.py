"""SIGHUP during the start of a program that later handles it, as by reading its configuration again."""

from __future__ import annotations

import signal


def ignore_hangups() -> None:
    """Ignore SIGHUP, which otherwise ends the program, until another handler replaces this one.

    It may come at once, as from logrotate or a terminal that is closed. A handler, because the programs that this one
    starts would inherit SIG_IGN.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda number, frame: None)


def obey_hangups() -> None:
    """End at SIGHUP again, unless the program was started with it ignored, as by nohup."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
