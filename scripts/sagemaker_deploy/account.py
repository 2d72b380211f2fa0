"""Sends all requests to AWS: makes clients with time-outs, checks requests, and adds advice to errors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ProfileNotFound

from scripts.register_autoscaling import Call, send
from scripts.sagemaker_deploy.errors import DeployError
from scripts.sagemaker_deploy.shapes import check

CONFIG = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard", "max_attempts": 5})
DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"}  # "403": of a HEAD of S3
RIGHTS = "docs/sagemaker.md lists the rights that a caller needs"


class Account:
    """An AWS account in a region, used with the rights of the caller."""

    def __init__(self, region: str | None = None, profile: str | None = None, endpoint_url: str | None = None) -> None:
        """endpoint_url: of an emulated AWS. Raises DeployError."""
        try:
            # boto3 ignores AWS_REGION, which takes precedence in AWS's other tools and in build_and_push.sh.
            region = region or os.environ.get("AWS_REGION") or None
            self._session = boto3.Session(region_name=region, profile_name=profile)
        except ProfileNotFound as error:
            raise DeployError(f"{error}: `aws configure list-profiles` lists the existing profiles") from error
        if self._session.region_name is None:
            raise DeployError("no region: give --region, or set AWS_REGION")
        self.region: str = self._session.region_name
        self._endpoint_url = endpoint_url
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        """Return the client of a service; each is made once."""
        if service not in self._clients:
            self._clients[service] = self._session.client(service, endpoint_url=self._endpoint_url, config=CONFIG)
        return self._clients[service]

    @cached_property
    def caller(self) -> str:
        """The caller's ARN. Raises DeployError."""
        return str(self.ask("sts", "get_caller_identity")["Arn"])

    def ask(self, service: str, operation: str, **parameters: Any) -> Any:
        """Send a request and return the answer. Raises AwsError if AWS refuses it, and DeployError otherwise."""
        try:
            return getattr(self.client(service), operation)(**parameters)
        except ClientError as error:
            raise translate(error) from error
        except BotoCoreError as error:
            raise _unreachable(error) from error

    def find(self, service: str, operation: str, **parameters: Any) -> Any | None:
        """Return the answer; None if there is no such resource. Raises DeployError."""
        try:
            return self.ask(service, operation, **parameters)
        except AwsError as error:
            if error.is_missing:
                return None
            raise

    def send(self, call: Call) -> Any:
        """Check and send a request. Raises DeployError."""
        check(call)
        return self.ask(call.service, call.operation, **call.parameters)

    def send_scaling(self, calls: Iterable[Call], *, skips_missing: bool = False) -> list[str]:
        """Send requests of Application Auto Scaling and its alarm. Raises DeployError."""
        try:
            return send(calls, self.client, skips_missing=skips_missing)
        except ClientError as error:
            raise translate(error) from error
        except BotoCoreError as error:
            raise _unreachable(error) from error


class AwsError(DeployError):
    """AWS refused a request."""

    def __init__(self, text: str, code: str, message: str) -> None:
        super().__init__(text)
        self.code = code
        self.message = message

    @property
    def is_denied(self) -> bool:
        return self.code in DENIED

    @property
    def is_missing(self) -> bool:
        """Whether the resource does not exist. SageMaker reports this only in the message."""
        return (
            self.code in ("404", "NoSuchEntity", "NoSuchKey", "NotFound")
            or self.code.endswith(("NotFoundException", "NotFound"))
            or (self.code == "ValidationException" and "could not find" in self.message.lower())
        )


def translate(error: ClientError) -> AwsError:
    """Return AWS's error with advice."""
    code, message = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "")
    operation = error.operation_name
    if code in DENIED:
        advice = RIGHTS
    elif code == "ResourceLimitExceeded":
        advice = (
            "a quota of this account is used up: use another --instance-type or fewer instances, delete unneeded "
            "endpoints, or ask for more in Service Quotas, Amazon SageMaker, `<type> for endpoint usage`"
        )
    elif code in ("ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException"):
        advice = "the credentials are invalid or expired: log in again"
    elif "assume role" in message.lower():
        advice = "the role's trust policy must let sagemaker.amazonaws.com do sts:AssumeRole"
    elif "repository" in message.lower() or "image" in message.lower():
        advice = "the image must lie in ECR in this region, and the role must be allowed to pull it"
    else:
        advice = ""
    text = f"{operation} failed: {message} ({code})"
    return AwsError(f"{text}\n  {advice}" if advice else text, code, message)


def _unreachable(error: BotoCoreError) -> DeployError:
    advice = ""
    if isinstance(error, NoCredentialsError):
        advice = "\n  give --profile, or set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return DeployError(f"{error}{advice}")
