"""The chat page: GET /chat and its files; GET /chat/endpoints lists its endpoints; `/` redirects browsers to it.

The files need no credentials: they hold no data of users, and the page is what asks a user for credentials.
/chat/endpoints needs them like the rest of the API.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from importlib.resources import files

from torchmoor.config.settings import ProxySettings
from torchmoor.proxy.api.other_services import refuse_unknown
from torchmoor.proxy.api.replies import LOOKING, Handler
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.routing import reasons
from torchmoor.wire import receipt

PAGE = b"/chat"
ENDPOINTS = b"/chat/endpoints"
ROOT = b"/"

# Allows only this page's files, its server, and images that it has itself; text never becomes markup, and no page
# may frame it.
CONTENT_SECURITY_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
_KINDS = {".html": b"text/html", ".css": b"text/css", ".js": b"text/javascript"}


class ChatPage:
    """Serves the page's paths.

    open_paths: those that need no credentials.
    """

    def __init__(self, registry: Registry, settings: ProxySettings) -> None:
        self._handlers: dict[bytes, Handler] = {
            PAGE + b"/": lambda request, request_id: _redirect(b"../chat"),
            ROOT: self._lead,
        }
        for file in files(__package__).iterdir():
            kind = _KINDS.get("." + file.name.rpartition(".")[2])
            if kind is not None:
                path = PAGE if file.name == "index.html" else b"%b/%b" % (PAGE, file.name.encode())
                self._handlers[path] = _serve(file.read_bytes(), kind)
        self._handlers[PAGE + b"/receipt.js"] = _serve(receipt.make_script().encode(), _KINDS[".js"])
        self.open_paths = frozenset(self._handlers)
        self._handlers[ENDPOINTS] = self._list
        self._registry = registry
        self._content = {
            "max_body_bytes": settings.limits.max_body_bytes,
            "reasons": reasons.SENTENCES,
        }

    def find_handler(self, method: bytes, path: bytes) -> Handler | None:
        """Return the handler of a path; None if the path does not belong to the page."""
        return self._handlers.get(path) if method in LOOKING else None

    def _list(self, request: Request, request_id: bytes) -> Reply:
        """List the endpoints that can chat, their known capabilities, and the page's limits.

        An endpoint with many models needs a TargetModel, and the kinds of its models are unknown here. Instances that
        this proxy has not started may run another handler: the page learns that when it opens a session there.
        """
        listed = [each for each in self._registry.endpoints() if not each.settings.has_many]
        for endpoint in listed:
            for variant in endpoint.variants:
                if any(each.started_at is not None and each.can_be_operated for each in variant.pool.members):
                    variant.needs_status = True
        endpoints = [each.name for each in listed]
        capabilities = {each.name: _capabilities(each) for each in listed}
        content = json.dumps({"endpoints": endpoints, "capabilities": capabilities, **self._content}).encode()
        headers = (*HEADERS, (b"content-type", b"application/json"), (b"cache-control", b"no-store"))
        return Reply(200, headers, content)

    def _lead(self, request: Request, request_id: bytes) -> Reply:
        """Redirect a browser; refuse a client of the API."""
        if b"text/html" in (request.find(b"accept") or b""):
            return _redirect(b"chat")
        return refuse_unknown(request, request_id)


def _serve(content: bytes, kind: bytes) -> Handler:
    """Return the handler of a file, which answers with 304 if the browser has it."""
    etag = b'"%b"' % blake2b(content, digest_size=12).hexdigest().encode()
    type_field = (b"content-type", kind + b"; charset=utf-8")
    headers = (*HEADERS, type_field, (b"etag", etag), (b"cache-control", b"no-cache"))
    whole, unchanged = Reply(200, headers, content), Reply(304, headers, content)

    def handle(request: Request, request_id: bytes) -> Reply:
        known = request.find(b"if-none-match") or b""
        return unchanged if etag in known or known.strip() == b"*" else whole

    return handle


def _capabilities(endpoint: Endpoint) -> dict[str, bool | int | None]:
    """Return whether the endpoint's instances read images, and how many per session; None: none has reported it."""
    reported = [each.reported for each in endpoint.instances]
    can_see = [each.can_see for each in reported if each.can_see is not None]
    max_images = [each.max_images for each in reported if each.max_images is not None]
    return {"can_see": any(can_see) if can_see else None, "max_images": min(max_images, default=None)}


def _redirect(location: bytes) -> Reply:
    """Redirect to a path relative to the request's, which works below a path prefix too."""
    return Reply(307, (*HEADERS, (b"location", location), (b"cache-control", b"no-store")))
