"""Marked answers, cut anywhere and continued by other targets."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from torchmoor.proxy.http.answer import Answer, Loss
from torchmoor.proxy.http.marked_answer import MarkedAnswer
from torchmoor.proxy.http.outgoing import ReplayBudget
from torchmoor.wire.continuation import MarkedPieceReader, PieceKind, mark_piece

PARTS = st.lists(st.binary(max_size=20), min_size=1, max_size=6)
BODY = b"the request"


class Target:
    """Continues an answer of these parts after those whose notes it is given; implements Continuer, too."""

    is_refused = False

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    def rest(self, notes: bytes) -> bytes:
        """Return the pieces that follow. The note of a piece ends with a point."""
        begun = notes.count(b".")
        assert notes == b"".join(b"%d." % number for number in range(begun))
        last = len(self._parts) - 1
        return b"".join(
            mark_piece(part, f"{number}.", PieceKind.END if number == last else PieceKind.PART)
            for number, part in enumerate(self._parts[begun:], begun)
        )

    def place(self, loss: Loss) -> Any:
        return "elsewhere"

    def request(self, notes: bytes, body: bytes, time_left_s: float | None) -> tuple[bytes, bytes]:
        assert body == BODY
        return b"", self.rest(notes)

    def accepts(self, head: Any) -> bool:
        return True

    def refuse(self) -> None:
        self.is_refused = True


def cut(data: bytes, lengths: list[int]) -> list[bytes]:
    """Cut bytes into pieces of these lengths; the rest is the last piece."""
    pieces = []
    for length in lengths:
        pieces.append(data[:length])
        data = data[length:]
    return [*pieces, data]


@given(PARTS, st.lists(st.integers(0, 12), max_size=12))
def test_pieces_are_the_same_however_they_are_cut(parts: list[bytes], lengths: list[int]) -> None:
    whole = Target(parts).rest(b"")
    reader = MarkedPieceReader()
    read = [piece for data in cut(whole, lengths) for piece in reader.take(data)]
    joined: list[bytes] = [b""]
    for piece in read:
        joined[-1] += piece.data
        if piece.is_whole:
            assert piece.note == b"%d." % (len(joined) - 1)
            joined.append(b"")

    assert joined == [*parts, b""]
    assert not reader.is_malformed


@given(PARTS, st.lists(st.lists(st.integers(0, 15), max_size=6), max_size=3), st.integers(10, 200))
def test_the_client_gets_each_byte_once(parts: list[bytes], losses: list[list[int]], limit: int) -> None:
    """Each target is lost after some of its bytes. The budget is the bytes that may be kept, and all are freed."""
    target, budget = Target(parts), ReplayBudget(max_body_bytes=limit, max_total_bytes=limit)
    answer = Answer(())
    answer.continuer = target
    marked, rest, received = MarkedAnswer(answer, budget, BODY), target.rest(b""), b""
    for lengths in losses:
        for data in cut(rest, lengths)[:-1]:  # the last never arrives
            received += marked.encode(data)
        assert budget.used_bytes <= limit
        if marked.is_ended or marked.place(Loss.RESET) is None:
            break
        rest = marked.request(None)[1]
        head: Any = None
        assert marked.try_resume(head)
    else:
        received += marked.encode(rest)
        assert marked.is_ended

    marked.release()

    whole = b"".join(parts)
    assert received == whole if marked.is_ended else target.is_refused and whole.startswith(received)
    assert budget.used_bytes == 0
