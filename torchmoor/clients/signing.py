"""Credentials of requests: a bearer token, an AWS key that signs them, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import boto3
from botocore import UNSIGNED
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config

from torchmoor.clients import runtime

SERVICE = "sagemaker"
RUNTIME = "sagemaker-runtime"
DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A user's credentials. Without token and keys, boto3 searches for keys as usual."""

    token: str = field(default="", repr=False)
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)  # as boto3.client's arguments


def make_client(url: str, login: Login, config: Config, service: str = RUNTIME) -> Any:
    """Make one of boto3's clients for this login. Raises ValueError for an invalid address, BotoCoreError."""
    if not login.token:
        return runtime.make_client(service, endpoint_url=url, keys=login.keys, config=config)
    unsigned = config.merge(Config(signature_version=UNSIGNED))
    client = runtime.make_client(service, endpoint_url=url, config=unsigned)

    def add_token(params: dict[str, Any], **_: object) -> None:
        params["headers"]["Authorization"] = f"Bearer {login.token}"

    client.meta.events.register(f"before-call.{service}", add_token)
    return client


class Signer:
    """Signs requests that do not go through boto3's client."""

    def __init__(self, login: Login) -> None:
        session = boto3.Session(**login.keys)
        found = None if login.token else runtime.find_credentials(session)
        self._token = login.token
        self._region = session.region_name or DEFAULT_REGION
        self._credentials = found  # those of a role are renewed as they expire

    def sign(self, method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> dict[str, str]:
        """Return the request's headers, credentials included."""
        if self._token:
            return {**headers, "Authorization": f"Bearer {self._token}"}
        if self._credentials is None:
            return dict(headers)
        request = AWSRequest(method, url, headers=dict(headers), data=body)
        SigV4Auth(self._credentials.get_frozen_credentials(), SERVICE, self._region).add_auth(request)
        return dict(request.headers.items())
