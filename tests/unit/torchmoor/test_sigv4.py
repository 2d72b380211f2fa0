"""Signature Version 4: everything that botocore signs is accepted, and anything different is refused."""

from calendar import timegm
from hashlib import sha256
from time import gmtime, strftime, strptime, time
from typing import Any
from urllib.parse import quote

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as Signer
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.heads import change_field, make_field, make_request
from torchmoor.config.access import AccessSettings
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.errors import AccessDenied, ApiError, IncompleteSignature, InvalidSignature
from torchmoor.proxy.access.gate import Gate
from torchmoor.proxy.access.sigv4 import make_signing_key
from torchmoor.proxy.http.message import Request

KEY_ID, SECRET = "AKIAEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
HOST = "llava.example:8080"
BODY_HASH = "X-Amz-Content-SHA256"

PATHS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30).map(lambda text: "/" + quote(text, safe="/.~"))
VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=30)
QUERY_PARTS = st.text("abcXYZ019-_.~%=", max_size=8)
QUERIES = st.lists(st.tuples(QUERY_PARTS, QUERY_PARTS), max_size=4).map(
    lambda pairs: "&".join("=".join(p) for p in pairs)
)
NAMES = st.sampled_from(
    (
        *("Content-Type", "Accept", "X-Custom", "X-Amzn-SageMaker-Custom-Attributes", "X-Amzn-SageMaker-Session-Id"),
        *("amz-sdk-invocation-id", "User-Agent", "X-Amzn-Trace-Id"),
    )
)
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=6)
BODIES = st.one_of(st.just(b""), st.binary(max_size=200), st.binary(min_size=1, max_size=4).map(lambda b: b * 50_000))


def sign(
    method: str, path: str, query: str, fields: list[tuple[str, str]], body: bytes, *, service: str = "sagemaker"
) -> AWSRequest:
    """Return a request signed by botocore."""
    url = f"http://{HOST}{path}" + (f"?{query}" if query else "")
    request = AWSRequest(method, url, data=body)
    for name, value in fields:
        request.headers.add_header(name, value)
    SigV4Auth(Signer(KEY_ID, SECRET), service, "us-east-1").add_auth(request)
    return request


def arrive(signed: AWSRequest, method: str, path: str, query: str, body: bytes) -> Request:
    """Return the request as the proxy's reader delivers it: lower-case names, stripped values."""
    fields = [
        (name.lower().encode(), str(value).strip(" \t").encode("latin-1"))
        for name, value in signed.headers.items()
        if name.lower() not in ("host", "content-length")
    ]
    fields.append((b"host", HOST.encode()))
    if body:
        fields.append((b"content-length", b"%d" % len(body)))
    return make_request(method.encode(), path.encode(), query.encode(), fields)


def make_gate(wall: float | None = None, **changes: Any) -> Gate:
    credentials = Credentials(keys={KEY_ID: AccessKey(secret=SECRET)})
    return Gate(AccessSettings(**changes), credentials, wall=time if wall is None else lambda: wall)


def judge(request: Request, body: bytes) -> None:
    """Verify a request as the proxy does. Raises ApiError."""
    gate = make_gate()
    gate.admit(request)
    assert (request.body_check is not None) == bool(body)
    if request.body_check is not None:
        request.body_check.verify(body)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(("GET", "POST", "PUT")), PATHS, QUERIES, FIELDS, BODIES)
def test_what_botocore_signs_is_accepted(
    method: str, path: str, query: str, fields: list[tuple[str, str]], body: bytes
) -> None:
    """Odd characters and dots in paths, spaces in and around values, repeated fields and any body are accepted."""
    judge(arrive(sign(method, path, query, fields, body), method, path, query, body), body)


@settings(max_examples=150, deadline=None)
@given(FIELDS, BODIES, st.data())
def test_what_differs_in_one_place_is_refused(fields: list[tuple[str, str]], body: bytes, data: st.DataObject) -> None:
    """A request with one changed byte of what is signed is refused."""
    path, query = "/endpoints/llava/invocations", "a=1"
    request = arrive(sign("POST", path, query, fields, body), "POST", path, query, body)
    signed_fields = [
        field for field in request.headers if field.name not in (b"authorization", b"user-agent", b"x-amzn-trace-id")
    ]
    match data.draw(st.sampled_from(("method", "path", "query", "host", "field", "body", "signature"))):
        case "method":
            request.method = b"PUT"
        case "path":
            request.path += b"x"
        case "query":
            request.line.query = b"a=2"
        case "host":
            change_field(request, b"host", b"other")
        case "field":
            field = data.draw(st.sampled_from(signed_fields))
            request.fields[request.fields.index(field)] = make_field(field.name, b"x" + field.value)
        case "body":
            body += b"x"
            request.content_length = len(body)
        case "signature":
            value = request.find(b"authorization") or b""
            last = b"0" if not value.endswith(b"0") else b"1"
            change_field(request, b"authorization", value[:-1] + last)

    with pytest.raises(AccessDenied):
        judge(request, body)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.text("AWS4-HMACSHA256 Credential=/,;SignedHeaders0123", max_size=200).map(str.encode),
    )
)
def test_no_authorization_field_is_a_fault(text: bytes) -> None:
    """Any Authorization field is refused with an ApiError, never with another exception."""
    for prefix in (b"", b"AWS4-HMAC-SHA256 ", b"Bearer "):
        fields = [(b"authorization", prefix + text), (b"host", b"h")]
        with pytest.raises(ApiError):
            make_gate().admit(make_request(b"POST", b"/x", fields=fields))


def test_the_length_of_the_body_may_be_signed() -> None:
    """A signed Content-Length, as other SDKs send it, is verified, although the reader keeps it apart."""
    signed = sign("POST", "/x", "", [("Content-Length", "3")], b"abc")
    assert "content-length" in signed.headers["Authorization"]

    judge(arrive(signed, "POST", "/x", "", b"abc"), b"abc")


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda text: text.replace("host;", ""), IncompleteSignature),
        (lambda text: text.replace(";x-amz-date", ""), IncompleteSignature),
        (lambda text: text.replace("/sagemaker/", "/s3/"), InvalidSignature),
        (lambda text: text.replace("/us-east-1/", "/eu-west-1/"), InvalidSignature),
        (lambda text: text.replace("Credential=AKIAEXAMPLE/2", "Credential=AKIAEXAMPLE/1"), InvalidSignature),
        (lambda text: text.replace("aws4_request", "aws5_request"), IncompleteSignature),
    ],
)
def test_a_changed_scope_is_refused(spoil: Any, error: type[AccessDenied]) -> None:
    """Date, region, service and the names of the signed fields are part of what is signed."""
    signed = sign("POST", "/x", "", [], b"")
    text = signed.headers["Authorization"]
    assert spoil(text) != text
    signed.headers.replace_header("Authorization", spoil(text))

    with pytest.raises(error):
        judge(arrive(signed, "POST", "/x", "", b""), b"")


@pytest.mark.parametrize(("offset_s", "word"), [(301, "expired"), (-301, "not yet current"), (299, ""), (-299, "")])
def test_the_clock_skew_is_the_settings(offset_s: float, word: str) -> None:
    """The clock skew counts from X-Amz-Date in both directions; the message has both times."""
    request = arrive(sign("POST", "/x", "", [], b""), "POST", "/x", "", b"")
    given_at = {field.name: field.value for field in request.headers}[b"x-amz-date"].decode()
    at = timegm(strptime(given_at, "%Y%m%dT%H%M%SZ"))
    gate = make_gate(wall=at + offset_s)

    if not word:
        gate.admit(request)
        return
    with pytest.raises(InvalidSignature) as caught:
        gate.admit(request)
    assert f"Signature {word}: {given_at}" in caught.value.message
    assert strftime("%Y%m%dT%H%M%SZ", gmtime(at + offset_s)) in caught.value.message


def test_a_date_that_is_none_is_told_so() -> None:
    """An impossible date, such as month 13, is refused as such."""
    signed = sign("POST", "/x", "", [], b"")
    day = signed.headers["X-Amz-Date"][:8]
    signed.headers.replace_header("X-Amz-Date", "20261301T000000Z")
    text = signed.headers["Authorization"].replace(f"/{day}/", "/20261301/")
    signed.headers.replace_header("Authorization", text)

    with pytest.raises(IncompleteSignature, match="not a time"):
        judge(arrive(signed, "POST", "/x", "", b""), b"")


def test_two_authorizations_are_refused() -> None:
    """Two Authorization fields are refused, because another component might read the other one."""
    signed = sign("POST", "/x", "", [], b"")
    signed.headers["authorization"] = "Bearer x"  # a second one: these headers keep both
    request = arrive(signed, "POST", "/x", "", b"")

    with pytest.raises(IncompleteSignature, match="More than one"):
        judge(request, b"")


def test_signing_keys_are_kept_but_not_without_bound() -> None:
    """The key of a secret and a day is computed once.

    The cache is limited, since clients can invent days and regions.
    """
    first = make_signing_key(SECRET, "20260101", "us-east-1")
    assert make_signing_key(SECRET, "20260101", "us-east-1") is first
    for number in range(3000):
        make_signing_key(SECRET, "20260101", f"r-{number}")

    assert make_signing_key.cache_info().currsize <= 1024
    assert make_signing_key(SECRET, "20260101", "us-east-1") == first


def test_declared_hash_is_judged_before_the_body_comes() -> None:
    """A wrong signature is refused at the head if the body's hash is declared; a valid one needs that body."""
    declared = sha256(b"abc").hexdigest()
    signed = sign("POST", "/x", "", [(BODY_HASH, declared)], b"abc")
    request = arrive(signed, "POST", "/x", "", b"abc")
    judge(request, b"abc")
    change_field(request, BODY_HASH.lower().encode(), sha256(b"abd").hexdigest().encode())
    request.body_check = None

    with pytest.raises(InvalidSignature):
        make_gate().admit(request)
    assert request.body_check is None


def test_a_caller_is_known_once_the_head_is_verified() -> None:
    """Once the head is verified, body bytes count for the caller.

    Without a hash in the head, for the client's address.
    """
    for fields, is_known in (([], False), ([(BODY_HASH, sha256(b"abc").hexdigest())], True)):
        request = arrive(sign("POST", "/x", "", fields, b"abc"), "POST", "/x", "", b"abc")
        make_gate().admit(request)

        assert request.body_check.is_head_verified == is_known
