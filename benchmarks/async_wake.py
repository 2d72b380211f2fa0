"""Measures how long an endpoint at zero instances takes to answer, compared with the start of an instance."""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from benchmarks.async_load import Client
from benchmarks.fleet import Fleet, running_fleet
from benchmarks.report import ROOT

CHECKPOINT = ROOT / "models" / "tiny-llava"
AT_ZERO = ("--min-instances", "0", "--scale-in-cooldown", "1", "--run-dir")
POLL_S = 0.02
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Wakes:
    """The times of each round.

    wakes_s: from the submit of a request to an endpoint at zero instances until its result exists. starts_s: the start
    of the same instance by `torchmoor up`, as the admin plane reports it.
    """

    wakes_s: list[float]
    starts_s: list[float]

    @property
    def wake_vs_start(self) -> float:
        return median([wake / start for wake, start in zip(self.wakes_s, self.starts_s, strict=True)])


def measure_wakes(folder: Path, num_rounds: int) -> Wakes:
    """In each round, start and stop an instance, then wake an endpoint, which scales to zero again.

    folder: of the endpoint's queue and results.
    """
    found = Wakes([], [])
    with running_fleet(CHECKPOINT, num_instances=0, arguments=(*AT_ZERO, str(folder))) as sleeping:
        client = Client(urlsplit(sleeping.runtime).port or 0, "llava")
        for number in range(num_rounds):
            with running_fleet(CHECKPOINT) as fleet:
                (instance,) = fleet.instances()
                found.starts_s.append(instance["last_start_s"])
            found.wakes_s.append(round(_wake(client, f"wake-{number}"), 2))
            if number + 1 < num_rounds:
                _wait_until_at_zero(sleeping)
    return found


def _wake(client: Client, invocation: str) -> float:
    began = time.monotonic()
    _, result, failure = client.submit(invocation)
    while not result.exists():
        if failure.exists() or time.monotonic() - began > TIMEOUT_S:
            raise SystemExit(f"the request that wakes the endpoint failed or took too long: there is no {result}")
        time.sleep(POLL_S)
    return time.monotonic() - began


def _wait_until_at_zero(fleet: Fleet) -> None:
    """Wait until the fleet has neither an instance nor a process of one."""
    began = time.monotonic()
    while fleet.instances() or fleet.has_instance_processes():
        if time.monotonic() - began > TIMEOUT_S:
            raise SystemExit(f"the endpoint has not scaled to zero after {TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
