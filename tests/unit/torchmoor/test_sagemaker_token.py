"""SageMaker's bearer tokens: those generated with a configured key are accepted, all others refused."""

from base64 import b64decode
from collections.abc import Callable
from datetime import datetime
from time import time
from typing import Any
from urllib.parse import parse_qs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.heads import make_request
from tests.sagemaker_tokens import MAX_LIFETIME_S, encode_url, make_token
from torchmoor.config.access import AccessSettings
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.errors import AccessDenied, InvalidSignature, UnrecognizedClient
from torchmoor.proxy.access.gate import Gate, principal_of

KEY_ID, SECRET = "AKIAEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TEMPORARY, SESSION_TOKEN = "ASIATEMPORARY", "FwoGZXIv//YXdz+EXAMPLE/token=="
URL = "https://sagemaker.amazonaws.com/?Action=CallWithBearerToken"
CREDENTIALS = Credentials(
    keys={KEY_ID: AccessKey(secret=SECRET), TEMPORARY: AccessKey(secret=SECRET, session_token=SESSION_TOKEN)}
)


def admit(token: str, *, wall: Callable[[], float] = time, **changes: Any) -> str:
    """Return the principal of a request with this token; raise AccessDenied if it is refused."""
    gate = Gate(AccessSettings(**changes), CREDENTIALS, wall=wall)
    fields = [(b"authorization", f"Bearer {token}".encode()), (b"host", b"elsewhere:8080")]
    request = make_request(b"POST", b"/v1/chat/completions", fields=fields)
    gate.admit(request)
    return request.principal


def url_of(token: str) -> str:
    return b64decode(token.removeprefix("sagemaker-api-key-")).decode()


def ended(text: str) -> str:
    """Return a token whose URL has another text after its signature."""
    return encode_url(url_of(make_token(KEY_ID, SECRET)).removesuffix("&Version=1") + text)


@pytest.mark.parametrize("region", ["us-east-1", "eu-central-2"])
def test_a_token_of_a_configured_key_has_that_keys_identity(region: str) -> None:
    """A token has its key's identity, so boto3 with the same key may use the same sessions."""
    assert admit(make_token(KEY_ID, SECRET, region=region)) == principal_of("key", KEY_ID)
    token = make_token(TEMPORARY, SECRET, SESSION_TOKEN, region=region)
    assert admit(token) == principal_of("key", TEMPORARY)


@pytest.mark.parametrize("lifetime_s", [1, 60, MAX_LIFETIME_S])
def test_a_token_ends_with_its_lifetime(lifetime_s: int) -> None:
    """The lifetime is the token's own; the allowed difference of clocks does not extend it."""
    token = make_token(KEY_ID, SECRET, lifetime_s=lifetime_s)
    [date] = parse_qs(url_of(token))["X-Amz-Date"]
    made_at = datetime.strptime(date, "%Y%m%dT%H%M%S%z").timestamp()  # it has whole seconds

    admit(token, wall=lambda: made_at + lifetime_s - 0.1)
    with pytest.raises(InvalidSignature, match="expired"):
        admit(token, wall=lambda: made_at + lifetime_s + 0.1)
    with pytest.raises(InvalidSignature, match="not yet current"):
        admit(token, wall=lambda: made_at - 400.0)


@pytest.mark.parametrize(
    ("token", "error"),
    [
        (make_token(KEY_ID, "another secret"), InvalidSignature),
        (make_token("AKIAUNKNOWN", SECRET), UnrecognizedClient),
        (make_token(KEY_ID, SECRET, SESSION_TOKEN), UnrecognizedClient),
        (make_token(TEMPORARY, SECRET), UnrecognizedClient),
        (make_token(TEMPORARY, SECRET, "another"), UnrecognizedClient),
        (make_token(KEY_ID, SECRET, lifetime_s=MAX_LIFETIME_S + 1), InvalidSignature),
        (make_token(KEY_ID, SECRET, lifetime_s=0), UnrecognizedClient),
        (make_token(KEY_ID, SECRET, url=URL.replace("sagemaker", "sagemaker.us-east-1")), UnrecognizedClient),
        (make_token(KEY_ID, SECRET, url=URL.replace("?", "x?")), UnrecognizedClient),
        (make_token(KEY_ID, SECRET, method="GET"), InvalidSignature),
        (make_token(KEY_ID, SECRET, url=URL.replace("CallWithBearerToken", "CreateModel")), UnrecognizedClient),
        (make_token(KEY_ID, SECRET, service="s3"), UnrecognizedClient),
        (ended("&Version=2"), UnrecognizedClient),
        (ended(""), UnrecognizedClient),
        (ended("&Action=CreateModel&Version=1"), UnrecognizedClient),
        (ended("&X=1&Version=1"), UnrecognizedClient),
        ("sagemaker-api-key-", UnrecognizedClient),
        ("sagemaker-api-key-%%%", UnrecognizedClient),
    ],
)
def test_a_token_of_another_kind_is_refused(token: str, error: type[AccessDenied]) -> None:
    """A token with another key, host, path, method, service, version, lifetime or the like is refused."""
    with pytest.raises(error):
        admit(token)


def test_the_configured_region_holds_for_tokens_too() -> None:
    """access.region limits tokens as it limits signatures."""
    admit(make_token(KEY_ID, SECRET, region="eu-west-1"), region="eu-west-1")
    with pytest.raises(InvalidSignature, match="valid region"):
        admit(make_token(KEY_ID, SECRET, region="us-east-1"), region="eu-west-1")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_changed_token_is_accepted(data: st.DataObject) -> None:
    """A token with one changed character at any place of its URL is refused."""
    url = url_of(make_token(TEMPORARY, SECRET, SESSION_TOKEN))
    at = data.draw(st.integers(0, len(url) - 1))
    other = data.draw(st.characters(min_codepoint=0x20, max_codepoint=0x17F).filter(lambda char: char != url[at]))

    with pytest.raises(AccessDenied):
        admit(encode_url(url[:at] + other + url[at + 1 :]))
