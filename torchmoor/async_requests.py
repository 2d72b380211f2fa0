"""`torchmoor async`: asynchronous requests, by way of the admin plane."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

from torchmoor.errors import TorchmoorError

TIMEOUT_S = 30.0
PIECE_BYTES = 1 << 20
PATH = "/async-requests"


class AdminError(TorchmoorError):
    """The admin plane cannot be reached, or refuses; the message says which."""


class AsyncRequests:
    """What the commands ask for. token: the admin plane's; "" if it has none."""

    def __init__(self, admin_url: str, token: str) -> None:
        if not admin_url.startswith(("http://", "https://")):
            raise AdminError(f"the admin plane's address must begin with http:// or https://, not {admin_url!r}")
        self._url = admin_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def list(self, endpoint: str | None, state: str | None, limit: int) -> dict[str, Any]:
        """An endpoint's requests, oldest first. Raises AdminError."""
        query = {key: value for key, value in (("endpoint", endpoint), ("state", state)) if value}
        return self._ask("GET", f"{PATH}?{urlencode({**query, 'limit': limit})}")

    def status(self, inference_id: str) -> dict[str, Any]:
        """One request. Raises AdminError."""
        return self._ask("GET", _path(inference_id))

    def cancel(self, inference_id: str) -> dict[str, Any]:
        """Cancel one; its state. Raises AdminError."""
        return self._ask("POST", _path(inference_id) + "/cancel")

    def get(self, inference_id: str) -> Iterator[bytes]:
        """A request's result, in pieces. Raises AdminError."""
        with self._open("GET", _path(inference_id) + "/result") as answer:
            while piece := answer.read(PIECE_BYTES):
                yield piece
            if answer.length:  # http.client says nothing of it where it is read in pieces
                raise AdminError(f"the result broke off, {answer.length} bytes before its end; fetch it again")

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        with self._open(method, path) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def _open(self, method: str, path: str) -> HTTPResponse:
        request = Request(self._url + path, method=method, headers=self._headers)
        try:
            answer: HTTPResponse = urlopen(request, timeout=TIMEOUT_S)
            return answer
        except HTTPError as error:
            with error:
                raise AdminError(_message(error)) from error
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise AdminError(f"no answer from the admin plane at {self._url}: {reason}") from error


def _path(inference_id: str) -> str:
    return f"{PATH}/{quote(inference_id, safe='')}"


def _message(error: HTTPError) -> str:
    if error.code == 401:
        return "the admin plane asks for its token: set TORCHMOOR_ADMIN_TOKEN"
    try:
        body = json.loads(error.read())
        if "state" in body:
            reason = f" ({body['reason']})" if body.get("reason") else ""
            return f"{body.get('error', 'The request has ended.')} It is {body['state']}{reason}."
        return str(body["error"])
    except (ValueError, KeyError, TypeError):
        return f"the admin plane answers with status {error.code}; does it belong to this version?"


def describe_list(found: dict[str, Any]) -> Iterator[str]:
    """A table for people."""
    yield f"{found['endpoint']}: {found['waiting']} waiting, {found['running']} running"
    for each in found["requests"]:
        age_s = max(0.0, time.time() - each["received_at"])
        yield f"{each['inference_id']:<38} {each['state']:<10} {age_s:8.0f} s  {each['reason'][:60]}".rstrip()


def describe_status(found: dict[str, Any]) -> Iterator[str]:
    """One request for people."""
    for key in ("inference_id", "endpoint", "state", "reason", "attempts", "instance", "input_location"):
        if found.get(key):
            yield f"{key}: {found[key]}"
    yield f"output_location: {found['output_location']}"
    yield f"failure_location: {found['failure_location']}"
