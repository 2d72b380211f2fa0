"""The bound on the number of values in a JSON text."""

from hypothesis import given
from hypothesis import strategies as st

from torchmoor.wire.json_values import MAX_SKIPS, count_values

# Repeated pieces that give fewer, as many, and more marks than skips.
TEXTS = st.lists(
    st.tuples(
        st.sampled_from([",", "[", "{", "a", "\u20ac,", '"']), st.sampled_from([1, MAX_SKIPS - 1, MAX_SKIPS, 5000])
    )
).map(lambda parts: "".join(text * number for text, number in parts))


@given(TEXTS)
def test_every_mark_is_counted_once(text: str) -> None:
    number = sum(letter in ",[{" for letter in text)

    assert count_values(text) == count_values(text.encode()) == number
