"""Bodies that match the served OpenAPI document, and bodies that almost do, never cause an internal error."""

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.torchserve.conftest import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.torchserve]
NUM_EXAMPLES = 60
RIGHT_PER_JUNK = 24
MAX_NEW_TOKENS = 4
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
TEXTS = st.text(max_size=12) | st.sampled_from(["llava", "user", "What color is it?", "text", "auto", "data:,x", "\0"])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for a schema's values; each part is sometimes another value."""
    right = _right_values_of(schema)
    return st.integers(1, RIGHT_PER_JUNK + 1).flatmap(lambda number: JUNK if number > RIGHT_PER_JUNK else right)


def _right_values_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "oneOf" in schema:
        return st.one_of([values_of(each) for each in schema["oneOf"]])
    match schema.get("type"):
        case "object" if "properties" in schema:
            fields = {name: values_of(each) for name, each in schema["properties"].items()}
            required = schema.get("required", ())
            return st.fixed_dictionaries(
                {name: each for name, each in fields.items() if name in required},
                optional={name: each for name, each in fields.items() if name not in required},
            )
        case "array":
            return st.lists(values_of(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=3)
        case "integer":
            return st.integers(schema.get("minimum", -3), 99)
        case "number":
            return st.floats(0, 2)
        case "boolean":
            return st.booleans()
        case "string":
            return TEXTS
    return JUNK


def routes_of(fleet: Fleet) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return path, schema of the body and schema of errors of each of OpenAI's routes with a body of JSON."""
    document = requests.get(f"{fleet.runtime}/openapi.json", timeout=60).json()
    found = []
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if path.startswith("/v1/") and content is not None:
            reference = methods["post"]["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
            error = document["components"]["schemas"][reference.rpartition("/")[2]]
            found.append((path.replace("{id}", "x").replace("{endpoint}", "llava"), content["schema"], error))
    assert len(found) > 8
    return found


def sending(http: requests.Session, address: str, error: dict[str, Any]) -> Callable[[Any], None]:
    """Return a function that sends a body, whose answer is kept short."""

    def send(body: Any) -> None:
        if isinstance(body, dict) and "model" in body:
            limits = {name: MAX_NEW_TOKENS for name in LIMITS if isinstance(body.get(name), int)}
            body = {**body, "model": "llava", **limits}
        answer = http.post(address, json=body, timeout=60)
        assert answer.status_code < 500 or answer.status_code == 503, (address, body, answer.text)
        if answer.status_code >= 400:
            jsonschema.validate(answer.json(), error)

    return send


def test_no_described_body_is_a_fault(fleet: Fleet) -> None:
    """The answer has a status below 500, or says that there is no room; errors have the documented form."""
    limits = settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    with requests.Session() as http:
        for path, schema, error in routes_of(fleet):
            limits(given(values_of(schema))(sending(http, f"{fleet.runtime}{path}", error)))()
