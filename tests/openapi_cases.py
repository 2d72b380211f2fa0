"""Requests that are made from an OpenAPI document and sent to the running product, whose answers must be as it says.

schemathesis makes them: for each operation some that follow the document, and some that break it.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CheckContext
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
TIMEOUT_S = 60


def has_no_fault(context: CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """Raise for an answer that shows an internal error; refusals are accepted."""
    assert response.status_code != 500, response.text


CHECKS = [
    has_no_fault,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


def with_values(document: dict[str, Any], values: Mapping[str, Sequence[object]]) -> dict[str, Any]:
    """Return the document with these values of parameters and body fields, so that requests reach a model."""
    made = copy.deepcopy(document)
    for methods in made["paths"].values():
        for route in methods.values():
            for parameter in route["parameters"]:
                if parameter["name"] in values:
                    parameter["schema"] = {"enum": list(values[parameter["name"]])}
            for content in route.get("requestBody", {}).get("content", {}).values():
                fields = content["schema"].get("properties", {})
                fields |= {name: {"enum": list(allowed)} for name, allowed in values.items() if name in fields}
    return made


def find_violations(document: dict[str, Any], url: str, *, max_examples: int) -> list[str]:
    """Send requests of each operation and kind; return violations of the document."""
    found: list[str] = []
    with requests.Session() as http:
        for result in schemathesis.openapi.from_dict(document).get_all_operations():
            operation = result.ok()
            for mode in MODES if _can_be_wrong(operation.definition.raw) else MODES[:1]:
                try:
                    _send(operation, mode, http, url, max_examples)
                except (Exception, BaseExceptionGroup) as error:
                    found.append(f"{operation.label} {mode.value}: {error}")
    return found


def _can_be_wrong(route: Mapping[str, Any]) -> bool:
    """Return False if each request to a route follows the document: it only has any names in its path.

    schemathesis would try hundreds of requests before it finds none.
    """
    names = [
        parameter["in"] == "path" and parameter["schema"] == {"type": "string"} for parameter in route["parameters"]
    ]
    return "requestBody" in route or not all(names)


def _send(
    operation: schemathesis.APIOperation[Any, Any, Any, Any],
    mode: schemathesis.GenerationMode,
    http: requests.Session,
    url: str,
    max_examples: int,
) -> None:
    @settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        case.validate_response(case.call(base_url=url, session=http, timeout=TIMEOUT_S), checks=CHECKS)

    send()
