"""Both parsers of JSON give the same values, and the slower one explains what is not JSON."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.errors import InvalidJson, InvalidRequest
from handlers.requests.json_values import begins_as_json, load_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.booleans(), st.sampled_from(["utf-8", "utf-16", "utf-8-sig"]))
def test_values_are_those_of_pythons_parser(value: Any, is_ascii: bool, encoding: str) -> None:
    """NaN, long numbers, half surrogate pairs and byte order marks give the values of Python's parser."""
    data = json.dumps(value, ensure_ascii=is_ascii).encode(encoding, "surrogatepass")
    expected = json.loads(data)

    for body in (data, bytearray(data)):
        found = load_json(body, 10_000)
        assert repr(found) == repr(expected)  # repr: NaN differs from itself, and 1 equals 1.0 and True


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "Expecting property name enclosed in double quotes at line 1 column 2"),
        (b'{"secret" 1}', "Expecting ':' delimiter at line 1 column 11"),
        (b'"secret', "Unterminated string starting at at line 1 column 1"),
        (b'"secret\xff"', "it is not UTF-8"),
        (b"[" * 100_000, "it cannot be parsed"),
        (b"1" * 5000, "it cannot be parsed"),
    ],
)
def test_an_error_names_the_place_and_nothing_of_the_text(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidJson) as raised:
        load_json(data, 1_000_000, what="the beginning", hint="; send JSON")

    assert raised.value.message == f"the beginning is not valid JSON: {reason}; send JSON"


def test_deep_nesting_is_read() -> None:
    """JSON nested deeper than the fast parser allows is read."""
    assert load_json(b"[" * 500 + b"]" * 500, 1000) == json.loads("[" * 500 + "]" * 500)


def test_too_many_values_are_refused_before_they_are_parsed() -> None:
    with pytest.raises(InvalidRequest, match="up to 12 JSON values; the limit is 10"):
        load_json(b"[1,1,1,1,1,1,1,1,1,1,1,1 this is not JSON", 10)


@pytest.mark.parametrize(
    ("body", "is_json"), [(b" \r\n {", True), (b"[", True), (b"", False), (b"\x89PNG{", False), (b"  ", False)]
)
def test_json_is_known_by_its_first_character(body: bytes, is_json: bool) -> None:
    assert begins_as_json(body) is is_json is begins_as_json(bytearray(body))
