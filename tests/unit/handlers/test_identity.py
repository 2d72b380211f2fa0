"""Requests are identified by their content, so that only a retry is taken for one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.chat.identity import identify, name_request
from handlers.chat.messages import ImageReference, KeptImage
from handlers.errors import InvalidRequest

TEXTS = st.text(st.characters(), max_size=3)  # with halves of surrogate pairs
PARTS = st.lists(st.one_of(TEXTS, st.binary(max_size=3), st.tuples(TEXTS)), max_size=3)


@given(PARTS, PARTS)
def test_equal_only_for_equal_parts(one: list[object], other: list[object]) -> None:
    assert (identify(*one) == identify(*other)) == (one == other)


def test_images_name_a_request_with_its_id() -> None:
    """An image from a file identifies the request in the same way however its bytes are read."""
    kept = KeptImage("a", lambda: b"a")
    others: list[list[ImageReference]] = [[], [b"a"], ["a"], ["a", b"a"], [kept]]

    assert len({name_request("id", images) for images in others}) == 5
    assert name_request("id", [kept]) == name_request("id", [KeptImage("a", lambda: b"b")])
    assert name_request("id", []) == "id"
    assert name_request("", [b"a"]) == ""


def test_what_is_nested_too_deeply_is_refused() -> None:
    """Although JSON of that depth can still be read."""
    value: Any = None
    for _ in range(5_000):
        value = [value]

    with pytest.raises(InvalidRequest, match="nested too deeply"):
        identify(value)
