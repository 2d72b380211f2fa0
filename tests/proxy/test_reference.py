"""The OpenAPI documents of both planes: valid, complete, and true of the running proxy."""

import ast
import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import requests
from aiohttp import web

from handlers.chat.parameters import OPENAI_NAMES, RULES
from handlers.many.openai_bodies import EMBEDDING_FIELDS, RERANK_FIELDS
from tests.openapi_cases import find_violations, with_values
from tests.proxy.conftest import MakeStage, Stage
from tests.proxy.fake_many import FakeFleet
from torchmoor.admin.models import ACTIONS
from torchmoor.admin.server import ADMIN_PLANE
from torchmoor.config.container import ContainerSettings
from torchmoor.config.routing import MultiModelSettings
from torchmoor.errors import AccessDenied
from torchmoor.proxy.api.openai_dialects import COMPLETIONS, TASKS, TOKENS
from torchmoor.proxy.api.reference import common_schemas, data_schemas, openai_schemas, resource_schemas
from torchmoor.proxy.api.reference.data_routes import DATA_PLANE
from torchmoor.proxy.api.reference.document import make_document
from torchmoor.proxy.dispatch.dispatchers import Dispatchers

PARAMETERS = {"endpoint": "llava", "model": "m1.tar.gz", "name": "a", "action": "pin"}
ODD_VALUES = ("", "x" * 2000, "a,b;c=d", "-1", "%00", "é".encode().decode("latin-1"))
BODIES = (b"", b"null", b"[]", b"{", b'{"model": 7}', b"\xff", b'{"a": ' * 2000)


def routes(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the method, the path with values for its parameters, and the description of each route."""
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            yield method.upper(), re.sub(r"{(\w+)}", lambda found: PARAMETERS.get(found[1], "x"), path), route


def example(schema: Any) -> Any:
    """Return the smallest value of a schema."""
    if "enum" in schema:
        return schema["enum"][0]
    if "oneOf" in schema:
        return example(schema["oneOf"][0])
    match schema.get("type"):
        case "object":
            return {name: example(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [example(schema.get("items", {}))] * schema.get("minItems", 0)
        case "integer":
            return 1
        case "boolean":
            return False
        case _:
            return "text"


def body_of(route: dict[str, Any]) -> bytes:
    content = route.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return b""
    fields = example(content["schema"]) if content["schema"].get("type") == "object" else {}
    return json.dumps({**fields, "model": "m1.tar.gz"}).encode()


@pytest.fixture
def planes(make_stage: MakeStage) -> dict[str, Stage]:
    """Return a proxy with many models in the container's role, in which each route is served."""
    many: dict[str, Any] = {"multi_model": MultiModelSettings(), "prepare": FakeFleet(("m1.tar.gz",), has_tasks=True)}
    return {
        "plain": make_stage(),
        "many": make_stage(**many),
        "container": make_stage(**many, container=ContainerSettings(serves_models=True)),
    }


@pytest.mark.parametrize("groups", [DATA_PLANE, ADMIN_PLANE])
def test_the_documents_are_sound(groups: Any) -> None:
    """Each operation has its own id, each body's schema is valid, and each error's schema is there."""
    document = make_document(groups)
    found = list(routes(document))

    assert (
        len({route["operationId"] for _, _, route in found}) == len(found) == sum(len(each.routes) for each in groups)
    )
    for _, _, route in found:
        reference = route["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.rpartition("/")[2] in document["components"]["schemas"]
        for content in route.get("requestBody", {}).get("content", {}).values():
            jsonschema.Draft202012Validator.check_schema(content["schema"])


WITHOUT_BODY = {("GET", "/ping"), ("GET", "/health"), ("GET", "/v1/responses")}  # also that to an upgrade


@pytest.mark.parametrize("groups", [DATA_PLANE, ADMIN_PLANE])
def test_each_body_has_a_schema(groups: Any) -> None:
    """That of each request and of each answer, which only the named routes lack; an answer's schema is valid."""
    for method, path, route in routes(make_document(groups)):
        answers = [answer for status, answer in route["responses"].items() if status != "default"]
        assert all("content" in answer for answer in answers) == ((method, path) not in WITHOUT_BODY), path
        for described in (*answers, route.get("requestBody", {})):
            for content in described.get("content", {}).values():
                assert content["schema"], (method, path)
                jsonschema.Draft202012Validator.check_schema(content["schema"])


OWN_FORM = {"InvokeEndpoint", "invocations", "invokeRoot", "invokeLoadedModel", "asyncResult"}  # of the model


def test_each_answer_has_its_own_schema() -> None:
    """Except for those of models, which may be any JSON value in the document: a new route needs a schema."""
    found = [route for groups in (DATA_PLANE, ADMIN_PLANE) for _, _, route in routes(make_document(groups))]
    any_value = {
        route["operationId"]
        for route in found
        for status, answer in route["responses"].items()
        for content in (answer.get("content", {}).values() if status != "default" else ())
        if content["schema"] == common_schemas.JSON_VALUE
    }

    assert any_value == OWN_FORM


def test_each_route_of_the_data_plane_answers(planes: dict[str, Stage]) -> None:
    """The served document equals the table's, every route is known to some role, and none causes an internal error."""
    url = planes["plain"].proxy.runtime_url
    document = requests.get(f"{url}/openapi.json", timeout=60).json()

    assert document == make_document(DATA_PLANE)
    for method, path, route in routes(document):
        answers = [
            requests.request(
                method,
                stage.proxy.runtime_url + path,
                data=body_of(route),
                headers={"Content-Type": "application/json"},
                timeout=60,
            )
            for stage in planes.values()
        ]
        assert all(answer.status_code != 500 for answer in answers), (method, path)
        assert any("UnknownOperationException" not in answer.text + str(answer.headers) for answer in answers), path


WITHOUT_ENDPOINT = {"/ping", "/health", "/v2/health/live", "/v2/health/ready", "/openapi.json"}


def test_each_route_finds_its_endpoint_in_one_place(planes: dict[str, Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatchers.get_endpoints finds the endpoint of every route, except for probes and the document itself."""

    def refuse(*of: object) -> None:
        raise AccessDenied("refused by the rule")

    monkeypatch.setattr(Dispatchers, "get_endpoints", refuse)
    url = planes["container"].proxy.runtime_url
    for method, path, route in routes(make_document(DATA_PLANE)):
        for base in ("", "/endpoints/llava/openai") if path.startswith("/v1/") else ("",):
            json_type = {"Content-Type": "application/json"}
            answer = requests.request(method, url + base + path, data=body_of(route), headers=json_type, timeout=60)
            assert ("refused by the rule" in answer.text) == (path not in WITHOUT_ENDPOINT), (method, base + path)


def test_no_value_of_a_documented_field_is_a_fault(planes: dict[str, Stage]) -> None:
    """Odd header fields, queries and bodies are refused or served; errors have the documented form."""
    stage, document = planes["container"], make_document(DATA_PLANE)
    schemas = document["components"]["schemas"]
    with requests.Session() as http:

        def check(method: str, path: str, route: dict[str, Any], **options: Any) -> None:
            answer = http.request(method, stage.proxy.runtime_url + path, timeout=60, **options)
            assert answer.status_code != 500, (method, path, options)
            if answer.status_code >= 400 and answer.content:
                reference = route["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
                jsonschema.validate(answer.json(), schemas[reference.rpartition("/")[2]])

        for method, path, route in routes(document):
            for parameter in route["parameters"]:
                for value in ODD_VALUES if parameter["in"] != "path" else ():
                    place = "headers" if parameter["in"] == "header" else "params"
                    check(method, path, route, data=body_of(route), **{place: {parameter["name"]: value}})
            for body in BODIES if "requestBody" in route else ():
                check(method, path, route, headers={"Content-Type": "application/json"}, data=body)
    stage.check_clean()


def test_each_route_of_the_admin_plane_answers(stage: Stage) -> None:
    """Routes of the admin plane's own port are answered as in the data plane's table."""
    url = stage.proxy.admin_url
    document = requests.get(f"{url}/openapi.json", timeout=60).json()

    assert document == make_document(ADMIN_PLANE)
    for method, path, route in routes(document):
        answer = requests.request(method, url + path, data=body_of(route), timeout=60)
        assert answer.status_code not in (405, 500), (method, path)


def test_answers_are_as_the_document_says(planes: dict[str, Stage]) -> None:
    """Statuses, media types and bodies, for requests that follow the document and for those that break it."""
    stage = planes["container"]
    values = {"endpoint": ["llava"], "model": ["m1.tar.gz"], "action": ["pin", "unpin", "other"]}
    for url in (stage.proxy.runtime_url, stage.proxy.admin_url):
        document = with_values(requests.get(f"{url}/openapi.json", timeout=60).json(), values)
        assert find_violations(document, url, max_examples=2) == []
    stage.check_clean()


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("DELETE", "/instances", 405)])
def test_unknown_requests_of_the_admin_plane_have_its_errors(stage: Stage, method: str, path: str, status: int) -> None:
    answer = stage.admin(path, method)

    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert ("Allow" in answer.headers) == (status == 405)


def documented(*groups: Any) -> set[tuple[str, str]]:
    """Return the methods and paths of a plane's document, without the names of parameters."""
    return {(route.method, re.sub(r"{\w+}", "{}", route.path)) for group in groups for route in group.routes}


def test_each_route_of_the_admin_plane_is_in_its_document(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for pages, and for the control plane, which AWS documents."""
    served: set[tuple[str, str]] = set()
    add_route = web.Resource.add_route

    def record(self: web.Resource, method: str, *given: Any, **options: Any) -> Any:
        served.add((method.lower(), re.sub(r"{\w+}", "{}", self.canonical)))
        return add_route(self, method, *given, **options)

    monkeypatch.setattr(web.Resource, "add_route", record)
    make_stage()
    pages = {route for route in served if route[1] == "/" or route[1].startswith(("/dashboard/", "/service/"))}

    assert len(served - pages) > 10
    assert {route for route in served - pages if route[0] != "head"} <= documented(*ADMIN_PLANE)


def test_the_document_names_the_actions_that_a_model_has() -> None:
    [route] = [route for group in ADMIN_PLANE for route in group.routes if route.path == "/models/{name}/{action}"]

    assert set(re.findall(r"\w+", route.text.lower())) - {"or", "a", "model"} == set(ACTIONS)


def test_each_resource_of_openais_api_is_in_the_document() -> None:
    """The document has each resource that the handler reads by its `match`, and those that the proxy reads itself."""
    source = (Path(__file__).parents[2] / "handlers/chat/dialects/resource_requests.py").read_text()
    cases = [node.pattern for node in ast.walk(ast.parse(source)) if isinstance(node, ast.match_case)]
    read = {
        (method.lower(), "/v1/" + "/".join(parts))
        for case in cases
        for method, *parts in forms(case)
        if method in ("GET", "POST", "DELETE")  # others are of the proxy's queue
    }
    asked = {("post", f"/v1/{path.decode()}") for path in (*COMPLETIONS, *TASKS, *TOKENS)}

    assert len(read) > 20
    assert read | asked <= documented(*DATA_PLANE)


def forms(pattern: ast.pattern) -> list[tuple[str, ...]]:
    """Return each sequence of words that a pattern matches, with {} for any word."""
    match pattern:
        case ast.MatchOr(patterns=patterns):
            return [form for each in patterns for form in forms(each)]
        case ast.MatchSequence(patterns=patterns):
            return [tuple(word for part in parts for word in part) for parts in product(*map(forms, patterns))]
        case ast.MatchValue(value=ast.Constant(value=str(word))):
            return [(word,)]
        case ast.MatchClass():
            return [("{}",)]
    return [("",)]


@pytest.mark.parametrize(
    ("schema", "others"),
    [
        (openai_schemas.CHAT, set()),
        (openai_schemas.COMPLETION, {"max_completion_tokens", "top_logprobs"}),
        (resource_schemas.RESPONSE, {"max_tokens", "max_completion_tokens", "logit_bias"}),
    ],
)
def test_each_parameter_of_an_answer_is_in_the_document(schema: dict[str, Any], others: set[str]) -> None:
    """Those that an API has under its own name, or does not have, are left out."""
    assert set(OPENAI_NAMES) - set(schema["properties"]) == others


def test_each_parameter_of_tgis_body_is_in_the_document() -> None:
    assert set(data_schemas.GENERATE["properties"]["parameters"]["properties"]) == set(RULES)


@pytest.mark.parametrize(
    ("schema", "fields"), [(openai_schemas.EMBEDDINGS, EMBEDDING_FIELDS), (openai_schemas.RERANK, RERANK_FIELDS)]
)
def test_each_field_of_a_task_is_in_the_document(schema: dict[str, Any], fields: set[str]) -> None:
    assert set(schema["properties"]) == fields
