"""The search for `model` in the beginning of a body, compared with Python's json."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmoor.errors import WrongModel
from torchmoor.proxy.api.body_fields import MAX_TOKENS, find_model

TEXTS = st.text(st.sampled_from('model"\\{}[]:, \nü'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.just("model"), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4), TEXTS, st.integers(0, 4), st.booleans(), st.data())
def test_it_is_what_json_reads(
    rest: dict[str, Any], model: str, place: int, is_ascii: bool, data: st.DataObject
) -> None:
    """The value equals json's, wherever it is in the body, and is found only once it is complete."""
    rest.pop("model", None)
    items = list(rest.items())
    items.insert(place, ("model", model))
    body = json.dumps(dict(items), ensure_ascii=is_ascii, indent=data.draw(st.sampled_from((None, 1)))).encode()

    assert find_model(body) == model

    found = find_model(body[: data.draw(st.integers(0, len(body)))])
    assert found in (None, model)


@given(VALUES.filter(lambda value: not isinstance(value, dict) or "model" not in value))
def test_what_has_none_has_none(value: Any) -> None:
    """`model` in nested objects and in texts is not found."""
    assert find_model(json.dumps(value).encode()) is None


@pytest.mark.parametrize("key", ['"model"', r'"mod\u0065l"', r'"\u006d\u006f\u0064\u0065\u006c"'])
def test_key_may_be_escaped(key: str) -> None:
    """An escaped key is found, as by a JSON reader."""
    assert find_model(f'{{"messages": ["model"], {key} : "a"}}'.encode()) == "a"


@pytest.mark.parametrize("value", ["7", "null", '["a"]', '{"a": 1}', r'"\x"', "}"])
def test_another_kind_of_value_is_refused(value: str) -> None:
    with pytest.raises(WrongModel, match="`model`"):
        find_model(f'{{"model": {value}'.encode() + b"}")


@pytest.mark.parametrize(
    "body", [b"", b'"', b'"model": "a"', b'[{"model": "a"}]', b"{]", b"nonsense", b'{"model', b"\xff"]
)
def test_what_is_no_object_has_none(body: bytes) -> None:
    """A body that is not an object has no model; the instance reports the error."""
    assert find_model(body) is None


def test_long_and_nested_values_are_skipped() -> None:
    """The longest permitted messages and tools before `model` are skipped."""
    part = {"type": "text", "text": 'a "long" text ' * 30, "x": "y" * 190}
    messages = [{"role": "user", "content": [part, {"type": "image_url", "image_url": {"url": "d" * 250}}]}] * 512
    properties = {f"field {number}": {"type": "string", "description": "z" * 150} for number in range(40)}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}] * 128
    body = json.dumps({"messages": messages, "tools": tools, "model": "a"}).encode()

    assert find_model(body) == "a"


def test_search_is_given_up_after_many_tokens() -> None:
    """The search ends after many tokens, so that a body of brackets does not delay the proxy."""
    few, many = (b'{"a": [%b], "model": "a"}' % (b"[]," * number) for number in (100, MAX_TOKENS))

    assert find_model(few) == "a"
    with pytest.raises(WrongModel, match="before the first 20000"):
        find_model(many)
