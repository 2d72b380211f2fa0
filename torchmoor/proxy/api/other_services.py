"""Answers to unknown requests: for other AWS services, to which AWS_ENDPOINT_URL applies, and for OpenAI without /v1.

Clients of S3, IAM or STS read XML, and would show no message of an error in JSON.
"""

from __future__ import annotations

import re

from torchmoor.errors import UnknownOperation
from torchmoor.proxy.access.sigv4 import CONTROL_SERVICES, SERVICE
from torchmoor.proxy.api.openai_dialects import openai_error
from torchmoor.proxy.api.replies import runtime_error, unknown_operation
from torchmoor.proxy.http.field_names import AWS_REQUEST_ID, CONTENT_TYPE
from torchmoor.proxy.http.message import Reply, Request

OWN = CONTROL_SERVICES | {SERVICE}  # their names in signatures
_SERVICE = re.compile(rb"Credential=[^,\s]*/([a-z0-9-]{1,40})/aws4_request")
# The ends of OpenAI's paths, of which only those without /v1 are unknown here.
_BELOW_V1 = (b"/chat/completions", b"/completions", b"/responses", b"/embeddings")
_XML = (CONTENT_TYPE, b"text/xml")


def find_service(request: Request) -> str:
    """Return the AWS service for which a request is signed; empty if it is not signed in a header."""
    match = _SERVICE.search(request.find(b"authorization") or b"")
    return "" if match is None else match[1].decode()


def refuse_unknown(request: Request, request_id: bytes) -> Reply:
    """Refuse an unknown request; say what to do if its service or its address is wrong."""
    service = find_service(request)
    if not service and request.path.endswith(_BELOW_V1):
        return openai_error(UnknownOperation("OpenAI's paths begin with /v1: add it to base_url."), request_id)
    if not service or service in OWN:
        return runtime_error(unknown_operation(request), request_id)
    variable = f"AWS_ENDPOINT_URL_{service.upper().replace('-', '_')}"
    message = f"torchmoor does not serve {service}: set {variable} to its own address, or leave AWS_ENDPOINT_URL unset."
    error = f"<Error><Code>UnknownOperationException</Code><Message>{message}</Message></Error>"
    body = error if service == "s3" else f"<ErrorResponse>{error}</ErrorResponse>"
    return Reply(404, (_XML, (AWS_REQUEST_ID, request_id)), f'<?xml version="1.0"?>{body}'.encode())
