"""Continues a stream at another instance after its own was lost: sends it the request, the start and the notes."""

from __future__ import annotations

from collections.abc import Callable

from torchmoor.proxy.dispatch.assignment import MAX_REPEATS, Assignment, Resume
from torchmoor.proxy.dispatch.refusal import Refusal
from torchmoor.proxy.http.answer import NOT_SENT, Loss
from torchmoor.proxy.http.call import Send, Wait
from torchmoor.proxy.http.field_names import CONTENT_TYPE, CONTINUABLE
from torchmoor.proxy.http.message import AnswerHead
from torchmoor.wire import headers
from torchmoor.wire.continuation import ContinuationRequest, join_request

_REPLACED = frozenset((CONTENT_TYPE,))
_FORMS = (b"multipart/", b"application/x-www-form-urlencoded")  # TorchServe parses such a body
_LINES = f"content-length: %d\r\ncontent-type: application/octet-stream\r\n{headers.CONTINUATION}: %d\r\n".encode()

RenderHead = Callable[[bytes, float | None, frozenset[bytes]], bytes]
"""Renders the head for the chosen instance, given framing lines, the time left and the fields to leave out."""


class StreamContinuer:
    """Implements Continuer for one request."""

    def __init__(
        self,
        start: str,
        assignment: Assignment,
        place: Callable[[], Send | Wait],
        resume: Resume,
        render_head: RenderHead,
        note_refusal: Callable[[AnswerHead], Refusal],
    ) -> None:
        """start: the beginning of the answer, as its instance described it (see torchmoor/wire/continuation.py).

        place: returns the next step after an assignment.
        """
        self._is_unbegun = False  # the last refusal was by an instance that had not begun the request
        self._start = start
        self._assignment = assignment
        self._place = place
        self._resume = resume
        self._render_head = render_head
        self._note_refusal = note_refusal

    @property
    def _content_type(self) -> bytes:
        return self._assignment.head.find(CONTENT_TYPE) or b""

    def place(self, loss: Loss) -> Send | Wait | None:
        """Assign another instance. None for a body that TorchServe parses, or if the proxy itself failed."""
        is_unbegun = loss in NOT_SENT or (loss is Loss.REFUSED and self._is_unbegun)
        if not is_unbegun and self._assignment.num_repeats >= MAX_REPEATS:
            self.refuse()
            return None
        is_whole = not self._content_type.lower().startswith(_FORMS)
        if not is_whole or loss is Loss.SHORTAGE:
            return None
        self._assignment.num_repeats += not is_unbegun
        return self._place() if self._assignment.try_continue(self._resume, loss) else None

    def request(self, notes: bytes, body: bytes, time_left_s: float | None) -> tuple[bytes, bytes]:
        """Render the request for the rest: the start and the notes go before the original body."""
        request = ContinuationRequest(self._content_type.decode("latin-1"), self._start, notes.decode("ascii"))
        about, joined = join_request(request, body)
        return self._render_head(_LINES % (len(joined), about), time_left_s, _REPLACED), joined

    def accepts(self, head: AnswerHead) -> bool:
        """Return True if the instance's answer continues this stream."""
        is_accepted = head.status == 200 and head.find(CONTINUABLE) is not None
        if is_accepted:
            self._assignment.metrics.streams_continued += 1
            self._assignment.note_first_piece()
        else:
            self._is_unbegun = self._note_refusal(head).is_unbegun
        return is_accepted

    def refuse(self) -> None:
        self._assignment.metrics.continuations_refused += 1
