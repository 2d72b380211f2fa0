"""How much an instance is given that has just come back: a share of the usual that grows from little to all.

Such an instance has fewer outstanding requests and more free room than any other, so that all new work would go to
it, and with a journal all of its sessions would return, and be built again, in the same moment.
"""

from __future__ import annotations


def share_after(elapsed_s: float, *, duration_s: float, least: float) -> float:
    """The share, from `least` at once to 1.0 when `duration_s` is over; it grows by as much each second."""
    if elapsed_s >= duration_s:
        return 1.0
    return least + (1.0 - least) * max(0.0, elapsed_s) / duration_s
