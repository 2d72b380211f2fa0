"""Where an answer is cut by stop sequences that overlap one another, or themselves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmoor.clients.stop import StopCutter

WORDS = st.text("ab", max_size=12)


def passed(pieces: list[str], stop: list[str]) -> str:
    cutter = StopCutter(stop)
    return "".join(map(cutter.feed, pieces)) + cutter.flush()


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("aaab", ["aab"], "a"),  # its beginning repeats itself
        ("xabcd", ["abcd", "bc"], "xa"),  # the one that is complete first, though it begins later
        ("xabc", ["abc", "bc"], "x"),  # both are complete: the longer one
        ("xab", ["abc"], "xab"),  # only the beginning of one
        ("xab", [""], "xab"),
    ],
)
def test_the_first_complete_sequence_cuts(text: str, stop: list[str], expected: str) -> None:
    """The first complete stop sequence cuts the text, whole and character by character."""
    assert passed([text], stop) == passed(list(text), stop) == expected


@given(WORDS, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(0, 12))
def test_cuts_of_the_text_do_not_matter(text: str, stop: list[str], at: int) -> None:
    """The result does not depend on how the text is divided, with an alphabet of two letters that overlap."""
    ends = [(end, end - len(s)) for s in stop for end in range(len(s), len(text) + 1) if text[:end].endswith(s)]
    expected = text[: min(ends)[1]] if ends else text

    assert passed([text[:at], text[at:]], stop) == passed(list(text), stop) == expected
