"""Slow start: an instance that becomes ready again gets a growing share of the usual work.

Such an instance has fewer outstanding requests and more free room than any other. Without slow start it would get all
new work, and with a journal all of its sessions would be rebuilt there at the same moment.
"""

from __future__ import annotations


def share_after(elapsed_s: float, *, duration_s: float, least: float) -> float:
    """Return the share: it grows evenly from `least` to 1.0 over `duration_s`."""
    if elapsed_s >= duration_s:
        return 1.0
    return least + (1.0 - least) * max(0.0, elapsed_s) / duration_s
