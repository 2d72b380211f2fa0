"""Renders docs/api.md, which lists every route of both planes, from the definitions of /openapi.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchmoor.admin.server import ADMIN_PLANE
from torchmoor.proxy.api.reference.data_routes import DATA_PLANE
from torchmoor.proxy.api.reference.document import make_document

HEAD = """# API reference

The routes of the two planes, written by `scripts/make_reference.py`. `GET /openapi.json` returns the same as an
OpenAPI 3.1 document, on each port for its own routes. [runtime-api.md](runtime-api.md), [responses.md](responses.md)
and [many-models.md](many-models.md) describe bodies and errors. Not listed are TorchServe's `/predictions/...`, the
operations of the [control plane](control-plane.md), the [chat page](chat-page.md) and the [dashboard](dashboard.md).

"""


def render() -> str:
    """Return the page."""
    planes = (("Data plane", DATA_PLANE), ("Admin plane", ADMIN_PLANE))
    return HEAD + "\n".join(_plane(title, make_document(groups)) for title, groups in planes)


def _plane(title: str, document: dict[str, Any]) -> str:
    sections = (_section(tag, document["paths"]) for tag in document["tags"])
    return f"## {title}\n\n" + "\n".join(sections)


def _section(tag: dict[str, str], paths: dict[str, dict[str, Any]]) -> str:
    rows = (
        f"| `{method.upper()} {path}` | {route['summary']} | {', '.join(_fields(route))} |\n"
        for path, routes in paths.items()
        for method, route in routes.items()
        if tag["name"] in route["tags"]
    )
    table = "| request | effect | fields of the query, the head and the body |\n|---|---|---|\n" + "".join(rows)
    return f"**{tag['name'].capitalize()}**: {tag['description']}\n\n{table}"


def _fields(route: dict[str, Any]) -> Iterator[str]:
    """Yield the names of a route's parameters and of its body's fields; required fields in bold."""
    for parameter in route["parameters"]:
        if parameter["in"] != "path":
            yield f"`{parameter['name']}`"
    for content in route.get("requestBody", {}).get("content", {}).values():
        required = content["schema"].get("required", ())
        for name in content["schema"].get("properties", {}):
            yield f"**`{name}`**" if name in required else f"`{name}`"
