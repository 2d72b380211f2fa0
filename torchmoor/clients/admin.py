"""Client of the admin plane's JSON API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from ssl import SSLCertVerificationError, SSLError
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import HTTPRedirectHandler, Request

from torchmoor.clients.errors import AdminError, AdminRefused, AdminUnreachable, AdminUntrusted
from torchmoor.clients.local import make_opener
from torchmoor.wire.connection_errors import failure_reason

TIMEOUT_S = 30.0


class _RefuseRedirects(HTTPRedirectHandler):
    """Follows no redirect: it would send the token elsewhere, and turn a POST into a GET."""

    def redirect_request(self, *_: object) -> None:
        return None


class _AdminAnswer(dict[str, Any]):
    """An object of an answer. A key that is not there raises AdminError: another service has answered."""

    def __init__(self, values: dict[str, Any], problem: str) -> None:
        super().__init__(values)
        self._problem = problem

    def __missing__(self, key: str) -> Any:
        raise AdminError(f"{self._problem} (its answer lacks {key!r})")


class AdminClient:
    """Calls one admin plane. token: "" if it needs none. Every method raises AdminError."""

    def __init__(self, url: str, token: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise AdminError(f"the admin plane's address must begin with http:// or https://, not {url!r}")
        self._url = url.rstrip("/")
        self._opener = make_opener(url, _RefuseRedirects)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str, query: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Return the JSON object at a path. Query values that are None are left out."""
        return self._ask("GET", path, query)

    def post(
        self, path: str, query: Mapping[str, object] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """Run an action and return its JSON object."""
        return self._ask("POST", path, query, timeout_s)

    def open(
        self, method: str, path: str, query: Mapping[str, object] | None = None, timeout_s: float = TIMEOUT_S
    ) -> HTTPResponse:
        """Send a request and return the response, whose body the caller reads."""
        given = urlencode({key: value for key, value in (query or {}).items() if value is not None})
        request = Request(f"{self._url}{path}{'?' * bool(given)}{given}", method=method, headers=self._headers)
        try:
            answer: HTTPResponse = self._opener.open(request, timeout=timeout_s)
            return answer
        except HTTPError as error:
            with error:
                raise self._refusal(error) from error
        except (URLError, OSError, HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, SSLCertVerificationError):
                raise AdminUntrusted(
                    f"no TLS connection to the admin plane at {self._url}: {failure_reason(error)} (SSL_CERT_FILE "
                    "names the certificate of a private authority)"
                ) from error
            if isinstance(reason, SSLError):
                reason = failure_reason(reason)
            elif isinstance(reason, OSError):
                reason = reason.strerror or reason  # without the error's number
            raise AdminUnreachable(
                f"no answer from the admin plane at {self._url}: {reason} (does the fleet run, and is this its "
                "--admin-url?)"
            ) from error

    def _ask(
        self, method: str, path: str, query: Mapping[str, object] | None, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        try:
            with self.open(method, path, query, timeout_s) as answer:
                found = json.load(answer, object_hook=self._expect_keys)
        except ValueError as error:
            raise AdminError(self._not_an_admin_plane()) from error
        except (OSError, HTTPException) as error:
            raise AdminUnreachable(f"the answer of the admin plane at {self._url} broke off: {error}") from error
        if not isinstance(found, dict):
            raise AdminError(self._not_an_admin_plane())
        return found

    def _expect_keys(self, values: dict[str, Any]) -> dict[str, Any]:
        return _AdminAnswer(values, self._not_an_admin_plane())

    def _not_an_admin_plane(self) -> str:
        return f"{self._url} does not answer as an admin plane does: is it the runtime's port?"

    def _refusal(self, error: HTTPError) -> AdminError:
        if error.code == 401:
            return AdminRefused("the admin plane requires its token: set TORCHMOOR_ADMIN_TOKEN, or give --keys FILE")
        try:
            message = _explain(json.loads(error.read()))
        except (ValueError, KeyError, TypeError):
            message = f"{self._not_an_admin_plane()} (status {error.code})"
        except (OSError, HTTPException) as broken:
            message = f"the admin plane at {self._url} answers with status {error.code} and breaks off: {broken}"
        return AdminRefused(message) if error.code == 403 else AdminError(message)


def _explain(body: Any) -> str:
    """Return an error body's message; it may have an asynchronous request's state, or an error per instance."""
    if "state" in body:
        reason = f" ({body['reason']})" if body.get("reason") else ""
        return f"{body.get('error', 'The request has ended.')} It is {body['state']}{reason}."
    if "error" not in body and "instances" in body:
        return "; ".join(f"{row['instance']}: {row['error']}" for row in body["instances"] if "error" in row)
    return str(body["error"])
