"""Late binding over several proxy processes: each has its own queue, and tells the others when its next is due.

Rules, for each variant:

    who waits writes into its row when the next of its requests is due, and again every BEAT_S while it waits
    a request goes to an instance only if none is due sooner in another process
    a session's turns, which can go to one instance only, are counted apart; what becomes free there is theirs first
    whoever makes room that it may not use itself wakes the process that may

So requests go nearly in the order in which one queue would let them go. A process that does not write any more (it
hangs) is left out after STALE_S, and nobody depends on being woken: who waits looks for itself at each beat.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from time import monotonic

from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.shared_counts import SharedCounts

BEAT_S = 0.02
STALE_S = 0.25  # more than a live process takes to come round on a busy machine


class WaitingElsewhere:
    """One variant's requests that wait in the other processes; the dispatcher's `others`.

    variant: its number, the same in all processes. wakers: an event descriptor for each process, by row.
    serve: lets go what waits here and can.
    """

    def __init__(
        self,
        counts: SharedCounts,
        variant: int,
        wakers: Sequence[int],
        serve: Callable[[], None],
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.refresh = counts.refresh
        self._counts = counts
        self._variant = variant
        self._wakers = wakers
        self._serve = serve
        self._clock = clock
        self._others = [row for row in range(counts.num_rows) if row != counts.row]
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def _read(self) -> Iterator[tuple[int, float]]:
        """The other processes where requests wait, and when the next is due."""
        now = self._clock()
        for row in self._others:
            due, written_at = self._counts.read_waiting(row, self._variant)
            if due and now - written_at < STALE_S:
                yield row, due

    def comes_before(self, deadline: float) -> bool:
        """True if a request that waits in another process, and could go anywhere, is due sooner."""
        return any(due < deadline for _, due in self._read())

    def has_turn_for(self, instance: Instance) -> bool:
        """True if a session's turn waits in another process for this instance."""
        return any(self._counts.read_turns(row, instance.name) for row, _ in self._read())

    def tell_waiting(self, deadline: float | None, home: str | None, num_turns: int) -> None:
        """When the next of the requests here is due, and how many turns wait for the instance `home`.

        deadline: of those that could go anywhere; infinite if there are only turns; None if nothing waits.
        """
        if home is not None:
            self._counts.write_turns(home, num_turns)
        due = deadline or 0.0
        if due != self._due:
            self._due = due
            self._counts.write_waiting(self._variant, due, self._clock())
        if due and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def pass_on(self, instance: Instance | None) -> None:
        """Wake those whose turns wait for the instance that has become free; else whose request is due soonest."""
        waiting = list(self._read())
        rows = [row for row, _ in waiting if instance is not None and self._counts.read_turns(row, instance.name)]
        if not rows and waiting:
            rows = [min(waiting, key=itemgetter(1))[0]]
        for row in rows:
            with suppress(BlockingIOError):  # it has been told often enough
                os.eventfd_write(self._wakers[row], 1)

    def _beat(self) -> None:
        self._timer = None
        if self._due:
            self._counts.write_waiting(self._variant, self._due, self._clock())
            self._serve()
            self._timer = self._timer or asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def stop(self) -> None:
        """Beat no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
