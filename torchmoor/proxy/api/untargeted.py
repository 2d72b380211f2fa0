"""What a Call (see torchmoor.proxy.http.call) never hears of that answers by itself: targets."""

from __future__ import annotations

from torchmoor.proxy.http.answer import Answer, Loss
from torchmoor.proxy.http.call import Target
from torchmoor.proxy.http.message import AnswerHead, Reply


class Untargeted:
    """The part of a Call that belongs to targets, of one that has none."""

    __slots__ = ()

    def request_head(self, framing: bytes, time_left_s: float | None) -> bytes:
        """Never asked."""
        raise AssertionError

    def on_abandoned(self) -> None:
        """Never told."""
        raise AssertionError

    def on_answer(self, head: AnswerHead, *, can_replay: bool) -> Answer:
        """Never asked."""
        raise AssertionError

    def on_refusal(self, body: bytes) -> Reply:
        """Never asked."""
        raise AssertionError

    def on_lost(self, loss: Loss, *, can_replay: bool) -> Target | Reply:
        """Never asked."""
        raise AssertionError
