"""The meaning of an instance's refusal of a request."""

from __future__ import annotations

from typing import NamedTuple

from torchmoor.proxy.http.field_names import ERROR_CODE
from torchmoor.proxy.http.message import AnswerHead
from torchmoor.wire import error_codes

REFUSED_FOR_NOW = frozenset(code.encode() for code in error_codes.REFUSED_FOR_NOW)


class Refusal(NamedTuple):
    """A refusal by TorchServe itself, or by the handler.

    is_busy: TorchServe's queue is full, or it has no worker. has_died: its worker has died, perhaps with the request.
    is_for_now: the handler cannot take the request now.
    """

    is_busy: bool
    has_died: bool
    is_for_now: bool

    @property
    def is_unbegun(self) -> bool:
        """True if the instance has certainly not begun the request, so that the request cannot have harmed it."""
        return (self.is_busy or self.is_for_now) and not self.has_died


def read_refusal(head: AnswerHead) -> Refusal:
    """Read the head of an answer that is not a success."""
    code, status = head.find(ERROR_CODE), head.status
    return Refusal(
        is_busy=code is None and status in error_codes.TORCHSERVE_BUSY,
        has_died=code is None and status in error_codes.WORKER_DIED,
        is_for_now=code in REFUSED_FOR_NOW,
    )
