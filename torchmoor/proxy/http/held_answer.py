"""An answer that waits for its call: receives, in place of the exchange, what the target has already sent."""

from __future__ import annotations

from torchmoor.proxy.http.answer import Loss
from torchmoor.proxy.http.message import AnswerHead
from torchmoor.proxy.http.upstream import AnswerReceiver


class HeldAnswer:
    """An AnswerReceiver. The connection is not read meanwhile, so little more arrives."""

    def __init__(self, head: AnswerHead, piece: bytes, *, is_complete: bool) -> None:
        self._head = head
        self._data = piece
        self._is_complete = is_complete
        self._loss: Loss | None = None

    def on_answer(self, head: AnswerHead, piece: bytes, *, is_complete: bool) -> None:
        """Do nothing: the head was received."""

    def on_answer_piece(self, piece: bytes, *, is_complete: bool) -> None:
        self._data += piece
        self._is_complete = is_complete

    def on_lost(self, loss: Loss) -> None:
        self._loss = loss

    def pass_on(self, receiver: AnswerReceiver) -> None:
        """Let the exchange receive what was held."""
        receiver.on_answer(self._head, self._data, is_complete=self._is_complete)
        if self._loss is not None and not self._is_complete:
            receiver.on_lost(self._loss)
