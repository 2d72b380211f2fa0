"""The OpenAPI documents of the two planes, generated from the table of routes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from torchmoor import __version__
from torchmoor.proxy.api.reference.data_routes import DATA_PLANE
from torchmoor.proxy.api.reference.route import Body, Group, Route
from torchmoor.proxy.api.replies import LOOKING, Handler
from torchmoor.proxy.api.runtime_members import MEMBERS, NumberMember
from torchmoor.proxy.http.message import Reply, Request

PATH = b"/openapi.json"
OPENAPI_VERSION = "3.1.0"

_PARAMETER = re.compile(r"{(\w+)}")


def find_handler(method: bytes, path: bytes) -> Handler | None:
    """Return the handler of GET /openapi.json; None for anything else."""
    return _answer if path == PATH and method in LOOKING else None


def make_document(groups: Sequence[Group]) -> dict[str, Any]:
    """Make the document of a plane."""
    paths: dict[str, dict[str, Any]] = {}
    for group in groups:
        for route in group.routes:
            paths.setdefault(route.path, {})[route.method] = _describe(group, route)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "torchmoor", "version": __version__},
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}, {"signature": []}],
        "tags": [{"name": group.name, "description": group.text} for group in groups],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "signature": {"type": "apiKey", "in": "header", "name": "Authorization", "description": "AWS SigV4."},
            },
            "schemas": {_error_name(group): group.error for group in groups},
        },
    }


def _describe(group: Group, route: Route) -> dict[str, Any]:
    answers = {str(status): {"description": text, **_content(body)} for status, text, body in route.answers}
    error = {"$ref": f"#/components/schemas/{_error_name(group)}"}
    made: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.text,
        "tags": [group.name],
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _names(route)),
            *({"name": name, "in": "query", "description": text, "schema": {}} for name, text in route.query),
            *map(_header, route.headers),
        ],
        "responses": {
            **answers,
            "default": {"description": "An error.", "content": {"application/json": {"schema": error}}},
        },
    }
    if route.body.types:
        made["requestBody"] = {"required": route.is_body_required, **_content(route.body)}
    return made


def _names(route: Route) -> list[str]:
    return _PARAMETER.findall(route.path)


def _content(body: Body) -> dict[str, Any]:
    content = {kind: {"schema": schema} for kind, schema in body.schemas().items()}
    return {"content": content} if content else {}


def _header(name: bytes) -> dict[str, Any]:
    member = MEMBERS[name]
    schema: dict[str, Any] = {"type": "string"}
    if isinstance(member, NumberMember):
        schema = {"type": "integer", "minimum": member.least, "maximum": member.most}
    else:
        schema |= {"minLength": member.min_length, "maxLength": member.max_length}
    return {"name": name.decode(), "in": "header", "description": f"`{member.name}` of the API.", "schema": schema}


def _error_name(group: Group) -> str:
    return "".join(word.capitalize() for word in group.name.split()) + "Error"


@cache
def _rendered() -> Reply:
    return Reply(200, ((b"content-type", b"application/json"),), json.dumps(make_document(DATA_PLANE)).encode())


def _answer(request: Request, request_id: bytes) -> Reply:
    return _rendered()
