"""End a process that stays in a test after the test's time limit.

pytest-timeout raises an exception in the main thread when the limit is exceeded, which fails the test and runs its
teardown. That does not help if the main thread is in C code, if an event loop catches the exception, or if the teardown
hangs, too. One thread of C code then prints the stacks of all threads and ends the process.
"""

import faulthandler
import os
import sys
from collections.abc import Generator

import pytest
from pytest_timeout import Settings

GRACE_S = 120  # for teardown, which may stop several fleets
LIMIT = pytest.StashKey[float]()


class TimeLimit:
    """Plugin; it writes to the standard error as it was before pytest's capture."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ else 2

    @pytest.hookimpl(wrapper=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Settings) -> Generator[None, object, object]:
        item.stash[LIMIT] = settings.timeout + self._grace_s
        self._arm(item)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Arm again: a failed test has cancelled every timer, in case a debugger is opened."""
        self._arm(item)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _arm(self, item: pytest.Item) -> None:
        if LIMIT in item.stash:
            faulthandler.dump_traceback_later(item.stash[LIMIT], file=self._stderr, exit=True)
