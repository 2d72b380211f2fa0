"""The 503 answers for requests that no instance can take: their messages."""

from __future__ import annotations

from time import monotonic

from torchmoor.errors import SHORTAGE, START_RETRY_S, ServiceUnavailable
from torchmoor.proxy.instances.endpoint import Variant
from torchmoor.proxy.instances.instance import InstanceState

SESSION_NOT_READY = "The session's instance is not ready. Try again later, or open another session."
ALL_BUSY = "All instances of the endpoint are busy. Try again later."
QUEUE_FULL = "Too many requests wait for an instance of the endpoint. Try again later."
NONE_FREE_IN_TIME = "No instance of the endpoint was free in time. Try again later."
INSTANCE_LOST = "The instance that was to answer is gone. Try again later."  # and the request may not be sent again
TORCHSERVE_BUSY = "The instance could not take the request. Try again later."  # see wire/error_codes.py
TOO_MANY_BODIES = "Too many request bodies are being received. Try again later."
TOO_MANY_SUBMITTED = "Too many requests are being queued. Try again later."
NO_CONNECTION = f"{SHORTAGE} Try again later."


def none_ready() -> ServiceUnavailable:
    """Return the answer where no instance is ready and none is started on demand."""
    return ServiceUnavailable("No instance of the endpoint is ready. Try again later.", retry_after_s=START_RETRY_S)


def none_started_in_time(variant: Variant) -> ServiceUnavailable:
    """Return the answer to a request that has waited too long for an instance to be started."""
    started = [i.started_at for i in variant.pool.members if i.state is InstanceState.STARTING]
    times = [at for at in started if at is not None]
    if not times:
        message = "No instance of the endpoint could be started in time. Try again later."
        return ServiceUnavailable(message, retry_after_s=START_RETRY_S)
    took_s, last_s = monotonic() - min(times), variant.last_start_s
    usual = "" if last_s is None else f"; the last start took {last_s:.0f} s"
    left_s = START_RETRY_S if last_s is None or last_s < took_s else 1 + int(last_s - took_s)
    return ServiceUnavailable(
        f"An instance of the endpoint is being started, for {took_s:.0f} s until now{usual}. Try again later.",
        retry_after_s=left_s,
    )
