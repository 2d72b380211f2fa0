"""Concurrent conversations: a fixed number of users (closed loop), or Poisson arrivals (open loop)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from time import monotonic

from pydantic import Field

from torchmoor.bench.client import Sample
from torchmoor.config.group import Count, Positive, SettingsGroup
from torchmoor.tasks import wait_at_most

NOT_SENT = "not sent: too many conversations at once"
Converse = Callable[[int, Callable[[], bool], Callable[[Sample], None]], Awaitable[None]]
USERS = 8
OPEN_USERS = 1000
DURATION_S = 30.0
PAUSE_S = 0.05  # after a failure, so that an endpoint that refuses at once is not flooded


class LoadSettings(SettingsGroup, title="load"):
    """The size of a load. It ends after duration_s, or num_requests questions, whichever is set and comes first.

    What is in flight then is finished and counted.
    """

    users: Count = Field(
        le=100_000,
        description=f"Concurrent conversations (default: {USERS}). With --rate, the maximum (default: {OPEN_USERS}); "
        "conversations above it count as failures.",
    )
    rate: Positive | None = Field(
        None, description="Open loop: send questions at this rate (Poisson arrivals), without waiting for answers."
    )
    num_turns: Count = Field(4, description="Questions per conversation.")
    duration_s: Positive | None = Field(
        None, description=f"Send no new questions after this (default: {DURATION_S:g}, unless --requests is given)."
    )
    num_requests: Count | None = Field(None, description="Stop after this number of questions.")
    seed: int = 0


@dataclass(slots=True)
class LoadOutcome:
    """The samples so far. began, ended: of the load, on the samples' clock."""

    samples: list[Sample] = field(default_factory=list)
    num_failed: int = 0  # of the samples
    num_running: int = 0  # conversations
    began: float = 0.0
    ended: float = 0.0
    is_interrupted: bool = False


class Load:
    """Runs a load once. `outcome` can be read meanwhile."""

    def __init__(self, settings: LoadSettings, converse: Converse) -> None:
        self.outcome = LoadOutcome()
        self._settings = settings
        self._converse_once = converse
        self._num_begun = 0
        self._num_spent = 0  # of num_requests
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Start no more questions; running ones finish."""
        self._stopped.set()
        self.outcome.is_interrupted = True

    async def run(self) -> LoadOutcome:
        """Run until the limit of the settings."""
        self.outcome.began = monotonic()
        await (self._arrive() if self._settings.rate else self._work())
        self.outcome.ended = monotonic()
        return self.outcome

    async def _work(self) -> None:
        """Run one user's conversations, one after another."""

        async def user() -> None:
            while not self._is_over():
                await self._converse()

        async with asyncio.TaskGroup() as group:
            for _ in range(self._settings.users):
                group.create_task(user())

    async def _arrive(self) -> None:
        """Start conversations at Poisson intervals, whether or not others have ended."""
        assert self._settings.rate
        random, at = Random(self._settings.seed), monotonic()
        async with asyncio.TaskGroup() as group:
            while not self._is_over():
                at += random.expovariate(self._settings.rate / self._settings.num_turns)
                await self._sleep_until(at)
                if self._is_over():
                    return
                if self.outcome.num_running >= self._settings.users:
                    self._take(Sample(monotonic(), monotonic(), error=NOT_SENT, was_asked=False))
                else:
                    group.create_task(self._converse())
                    await asyncio.sleep(0)  # it counts itself

    async def _sleep_until(self, at: float) -> None:
        """Sleep, or return early when the load ends."""
        if self._settings.duration_s is not None:
            at = min(at, self.outcome.began + self._settings.duration_s)
        await wait_at_most(max(0.0, at - monotonic()), self._stopped)

    async def _converse(self) -> None:
        number, self._num_begun = self._num_begun, self._num_begun + 1
        samples: list[Sample] = []

        def take(sample: Sample) -> None:
            samples.append(sample)
            self._take(sample)

        self.outcome.num_running += 1
        try:
            await self._converse_once(number, self._may_ask, take)
            if any(sample.error for sample in samples):
                await asyncio.sleep(PAUSE_S)
        finally:
            self.outcome.num_running -= 1

    def _may_ask(self) -> bool:
        """Return whether another question may be asked, and count it."""
        if self._is_over():
            return False
        self._num_spent += 1
        return True

    def _take(self, sample: Sample) -> None:
        self.outcome.samples.append(sample)
        self.outcome.num_failed += sample.error is not None
        self._num_spent += not sample.was_asked

    def _is_over(self) -> bool:
        most, duration_s = self._settings.num_requests, self._settings.duration_s
        return (
            self._stopped.is_set()
            or (most is not None and self._num_spent >= most)
            or (duration_s is not None and monotonic() - self.outcome.began >= duration_s)
        )
