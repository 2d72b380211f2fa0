"""A marked answer: removes the marks from its pieces, and keeps the notes by which another target continues it."""

from __future__ import annotations

from torchmoor.proxy.http.answer import Answer, Loss
from torchmoor.proxy.http.call import Continuer, NextStep
from torchmoor.proxy.http.message import AnswerHead
from torchmoor.proxy.http.outgoing import ReplayBudget
from torchmoor.wire.continuation import MarkedPieceReader, PieceKind

MAX_DIGITS = 12  # of the number of an answer's tokens


class MarkedAnswer:
    """An Encoder before the answer's own one.

    is_ended: the answer's last piece has passed. num_tokens: of the whole answer, if that piece says it.

    It keeps the request's body and the notes of all pieces while the budget allows, and the parts of an incomplete
    piece: as long as another target could continue the answer, only whole pieces are forwarded.
    """

    __slots__ = (
        "is_ended",
        "num_tokens",
        "_continuer",
        "_encoder",
        "_reader",
        "_budget",
        "_body",
        "_notes",
        "_parts",
        "_num_kept",
        "_failure",
    )

    def __init__(self, answer: Answer, budget: ReplayBudget, body: bytes | None) -> None:
        """answer: whose encoder this replaces. body: the request's; None if it is no longer kept."""
        self.is_ended = False
        self.num_tokens: int | None = None
        self._continuer: Continuer | None = answer.continuer
        answer.continuer = None
        self._encoder = answer.encoder
        self._reader = MarkedPieceReader()
        self._budget = budget
        self._body = body or b""
        self._notes: list[bytes] = []
        self._parts: list[bytes] = []
        self._num_kept = 0
        self._failure = b""  # the failure that the last instance reported
        if body is None:
            self._refuse()
        else:
            self._keep(len(body))

    @property
    def has_failed(self) -> bool:
        """Return whether the answer's own encoder has found an error at its end."""
        return self._encoder is not None and self._encoder.has_failed

    @property
    def is_malformed(self) -> bool:
        """Whether a piece was malformed; then no more can be read of this target's answer."""
        return self._reader.is_malformed

    def place(self, loss: Loss) -> NextStep | None:
        """Choose another target for the rest of the answer; None if there is none, or if too little is kept."""
        return None if self._continuer is None else self._continuer.place(loss)

    def request(self, time_left_s: float | None) -> tuple[bytes, bytes]:
        """Render head and body of the request for the rest."""
        assert self._continuer is not None
        return self._continuer.request(b"".join(self._notes), self._body, time_left_s)

    def try_resume(self, head: AnswerHead) -> bool:
        """Expect the rest from the target with this head; return False if it does not continue the answer."""
        self._reader = MarkedPieceReader()
        self._free(sum(map(len, self._parts)))  # of the lost target
        self._parts.clear()
        is_accepted = self._continuer is not None and self._continuer.accepts(head)
        if is_accepted:
            self._failure = b""
        return is_accepted

    def encode(self, piece: bytes) -> bytes:
        passed: list[bytes] = []
        for data, note, kind, is_whole in self._reader.take(piece):
            if self._parts or not is_whole:
                data = self._join(data, kind, is_whole=is_whole)
            if is_whole and kind is PieceKind.FAILURE:
                self._failure = data
                continue
            if is_whole and note and self._continuer is not None:
                self._notes.append(note)
                self._keep(len(note))
            self.is_ended = is_whole and kind is PieceKind.END
            if self.is_ended and note.isdigit():
                self.num_tokens = int(note[:MAX_DIGITS])
            passed.append(data)
        together = b"".join(passed)
        return self._pass_on(together) if together else b""

    def _join(self, part: bytes, kind: PieceKind, *, is_whole: bool) -> bytes:
        """Keep a part of a piece; return the bytes to forward: none until the piece is whole or is not kept."""
        self._parts.append(part)
        is_failure = kind is PieceKind.FAILURE  # forwarded only at the end, and short
        if not is_failure:
            self._keep(len(part))
        if not is_whole and (is_failure or self._continuer is not None):
            return b""
        joined = b"".join(self._parts)
        self._parts.clear()
        if not is_failure:
            self._free(len(joined))
        return joined

    def _pass_on(self, data: bytes) -> bytes:
        return data if self._encoder is None else self._encoder.encode(data)

    def finish(self) -> bytes | None:
        return b"" if self._encoder is None else self._encoder.finish()

    def fail(self, loss: Loss) -> bytes | None:
        """End the answer with the failure that the instance reported; without one, as the answer's own encoder does."""
        if self._failure:
            failure, tail = self._pass_on(self._failure), self.finish()
            return None if tail is None else failure + tail
        return None if self._encoder is None else self._encoder.fail(loss)

    def release(self) -> None:
        """Free what is kept. May be called again."""
        self._free(self._num_kept)
        self._body = b""
        self._notes = []
        self._continuer = None

    def _keep(self, num_bytes: int) -> None:
        """Count more bytes as kept; free all if they are too many. Counts nothing once all was freed."""
        if self._continuer is None:
            return
        is_within = self._num_kept + num_bytes <= self._budget.max_body_bytes
        if is_within and self._budget.try_take(num_bytes):
            self._num_kept += num_bytes
        else:
            self._refuse()

    def _refuse(self) -> None:
        if self._continuer is not None:
            self._continuer.refuse()
        self.release()

    def _free(self, num_bytes: int) -> None:
        if self._num_kept:
            self._budget.release(num_bytes)
            self._num_kept -= num_bytes
