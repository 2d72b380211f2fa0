"""Generates random JSON schemas like those of clients: nested objects, arrays, choices, references and bounds."""

from typing import Any

from hypothesis import strategies as st

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6)
CONSTANTS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-99, 99),
    st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=5),
)


def _bounded(low: Any, high: Any) -> Any:
    return st.tuples(low, high).map(lambda pair: (min(pair), max(pair)))


STRINGS = st.one_of(
    _bounded(st.integers(0, 4), st.integers(0, 12)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[1]}
    ),
    st.sampled_from(["^[a-z]{1,4}$", "^(yes|no)$", r"^\d{3}-\d{2}$", "^[A-Z][a-z]*x$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "date-time", "email", "uuid", "ipv4"]).map(
        lambda name: {"type": "string", "format": name}
    ),
)
NUMBERS = st.one_of(
    _bounded(st.integers(-999, 999), st.integers(-999, 999)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[1]}
    ),
    _bounded(st.integers(-9, 9), st.integers(10, 99)).map(
        lambda pair: {"type": "number", "exclusiveMinimum": pair[0], "exclusiveMaximum": pair[1]}
    ),
    st.sampled_from([{"type": "integer"}, {"type": "number"}]),
    st.integers(2, 9).map(lambda step: {"type": "integer", "multipleOf": step, "minimum": 0, "maximum": 99}),
)
LEAVES = st.one_of(
    STRINGS,
    NUMBERS,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.lists(CONSTANTS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    CONSTANTS.map(lambda value: {"const": value}),
    st.just({"$ref": "#/$defs/shared"}),
    st.just({"type": ["string", "null"], "maxLength": 5}),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, min_size=1, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _lists(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(inner, _bounded(st.integers(0, 2), st.integers(0, 4))).map(
        lambda given: {"type": "array", "items": given[0], "minItems": given[1][0], "maxItems": given[1][1]}
    )


def _more(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    choices = st.lists(inner, min_size=1, max_size=3).map(lambda given: {"anyOf": given})
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda given: {"type": "array", "prefixItems": given, "items": False, "minItems": len(given)}
    )
    return st.one_of(_objects(inner), _lists(inner), choices, tuples)


SCHEMAS = st.tuples(st.recursive(LEAVES, _more, max_leaves=8), st.one_of(STRINGS, NUMBERS)).map(
    lambda given: {**given[0], "$defs": {"shared": given[1]}}
)
