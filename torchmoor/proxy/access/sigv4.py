"""Verification of AWS Signature Version 4 in the Authorization header.

The canonical request is built by hand, because botocore's signer takes ten times as long; a test compares the two. A
signature covers the method, the path, the query, the signed header fields and the hash of the body.
Source: AWS, "Create a signed AWS API request"; error messages are worded as AWS does.
"""

from __future__ import annotations

import hmac
import re
from calendar import timegm
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from time import gmtime, strftime, strptime
from urllib.parse import quote

from torchmoor.config.credentials import AccessKey
from torchmoor.errors import (
    AccessDenied,
    IncompleteSignature,
    InvalidSignature,
    UnrecognizedClient,
)
from torchmoor.proxy.http.message import Request
from torchmoor.wire.headers import SAGEMAKER_PREFIX

ALGORITHM = b"AWS4-HMAC-SHA256"
SERVICE = "sagemaker"
CONTROL_SERVICES = frozenset(("application-autoscaling", "logs", "monitoring"))  # for the control plane's paths only
UNSIGNED_PAYLOAD = b"UNSIGNED-PAYLOAD"
EMPTY_HASH = sha256(b"").hexdigest().encode()
MAX_SIGNING_KEYS = 1024

_DATE = b"x-amz-date"
_BODY_HASH = b"x-amz-content-sha256"
_SECURITY_TOKEN = b"x-amz-security-token"
# Unsigned, these fields could be changed on the way and give the request another meaning. (X-Amzn-Trace-Id is not
# among them: an AWS load balancer adds it.)
_MUST_BE_SIGNED = (b"x-amz-", SAGEMAKER_PREFIX.encode())
_PARTS = re.compile(
    rb"AWS4-HMAC-SHA256 Credential=([^/, ]+)/(\d{8})/([a-z0-9-]+)/([a-z0-9-]+)/aws4_request,"
    rb" ?SignedHeaders=([^, ]+), ?Signature=([0-9a-f]{64})"
)
_TIME = re.compile(rb"\d{8}T\d{6}Z")
_HASH = re.compile(rb"[0-9a-f]{64}")
_TIME_FORM = "%Y%m%dT%H%M%SZ"
_PRESIGNED = (b"X-Amz-Signature=", b"X-Amz-Credential=", b"X-Amz-Algorithm=")
_EXAMPLE = "Authorization: AWS4-HMAC-SHA256 Credential=..., SignedHeaders=..., Signature=..."


@dataclass(slots=True, repr=False)
class Signed:
    """A request whose signature is read but not verified.

    access_key: its id. declared_hash: the body's hash in the head; None if it is not there. canonical: the canonical
    request without its last line.
    """

    access_key: str
    declared_hash: bytes | None
    canonical: bytes
    time: bytes
    scope: bytes
    signing_key: bytes
    signature: bytes

    def verify_body(self, body: bytes) -> None:
        """Raise InvalidSignature unless this body was signed; a hash that the head declares was verified with it."""
        body_hash = sha256(body).hexdigest().encode()
        if self.declared_hash is None:
            self.verify(body_hash)
        elif self.declared_hash != body_hash:
            raise InvalidSignature("The provided 'x-amz-content-sha256' header does not match what was computed.")

    def verify(self, body_hash: bytes) -> None:
        """Raise InvalidSignature unless the key's secret signs this request with a body of this hash."""
        digest = sha256(self.canonical + body_hash).hexdigest().encode()
        text = b"\n".join((ALGORITHM, self.time, self.scope, digest))
        expected = hmac.digest(self.signing_key, text, "sha256").hex().encode()
        if not hmac.compare_digest(expected, self.signature):
            raise InvalidSignature(
                "The request signature we calculated does not match the signature you provided. Check your AWS Secret "
                "Access Key and signing method, and that nothing on the way changes the Host header."
            )


class SigV4:
    """Reads signatures that any of the keys may have made."""

    def __init__(
        self, keys: Mapping[str, AccessKey], *, region: str, clock_skew_s: float, wall: Callable[[], float]
    ) -> None:
        """region: "" for any. wall: seconds since 1970."""
        self._keys = keys
        self._region = region
        self._clock_skew_s = clock_skew_s
        self._wall = wall
        self._times: tuple[bytes, float] = (b"", 0.0)

    def read(self, request: Request, authorization: bytes) -> Signed:
        """Check all that the head alone can show. Raises AccessDenied."""
        parts = _PARTS.fullmatch(authorization)
        if parts is None:
            raise _why_incomplete(authorization)
        key_id, day, region, service = (part.decode("latin-1") for part in parts.groups()[:4])
        names = parts[5].split(b";")
        fields: dict[bytes, bytes] = {}
        for field in request.headers:
            name, value = field.name, field.value
            before = fields.get(name)
            fields[name] = value if before is None else b"%b,%b" % (before, value)
        time = fields.get(_DATE, b"")
        _check_names(names, fields)
        key = self.find_key(key_id, fields.get(_SECURITY_TOKEN, b""))
        self._check_service(service, request.path)
        self.check_region(region)
        self.check_time(time, day, self._clock_skew_s)
        declared = fields.get(_BODY_HASH)
        if declared is not None and declared != UNSIGNED_PAYLOAD and not _HASH.fullmatch(declared):
            raise InvalidSignature("x-amz-content-sha256 must be UNSIGNED-PAYLOAD, or the body's hash in hexadecimal.")
        return Signed(
            key_id,
            declared,
            _canonical_request(request, names, fields, parts[5]),
            time=time,
            scope=f"{day}/{region}/{service}/aws4_request".encode(),
            signing_key=make_signing_key(key.secret, day, region, service),
            signature=parts[6],
        )

    def find_key(self, key_id: str, session_token: bytes) -> AccessKey:
        """Return the key of this id. Raises UnrecognizedClient if it is unknown or has another session token."""
        key = self._keys.get(key_id)
        if key is None or not hmac.compare_digest(session_token, key.session_token.encode()):
            raise UnrecognizedClient()
        return key

    @staticmethod
    def _check_service(service: str, path: bytes) -> None:
        is_control = service in CONTROL_SERVICES and (path == b"/" or path.startswith(b"/service/"))
        if service != SERVICE and not is_control:
            raise InvalidSignature(f"Credential should be scoped to correct service: '{SERVICE}'.")

    def check_region(self, region: str) -> None:
        """Raise InvalidSignature if only another region is accepted."""
        if self._region and region != self._region:
            raise InvalidSignature(f"Credential should be scoped to a valid region, not '{region}'.")

    def check_time(self, time: bytes, day: str, lifetime_s: float) -> None:
        """Raise AccessDenied unless a signature of this time and this day in its scope is valid now."""
        if not time.startswith(day.encode()):
            raise InvalidSignature("Date in Credential scope does not match YYYYMMDD from X-Amz-Date.")
        known, at = self._times
        if time != known:
            at = _read_time(time)
            self._times = (time, at)
        now, skew_s = self._wall(), self._clock_skew_s
        if at < now - lifetime_s:
            raise InvalidSignature(
                f"Signature expired: {time.decode()} is now earlier than {_write_time(now - lifetime_s)} "
                f"({_write_time(now)} - {lifetime_s / 60:g} min.)"
            )
        if at > now + skew_s:
            raise InvalidSignature(
                f"Signature not yet current: {time.decode()} is now later than {_write_time(now + skew_s)} "
                f"({_write_time(now)} + {skew_s / 60:g} min.)"
            )


@lru_cache(MAX_SIGNING_KEYS)
def make_signing_key(secret: str, day: str, region: str, service: str = SERVICE) -> bytes:
    """Return the secret bound to a day, region and service, the same for all requests of a day."""
    made = f"AWS4{secret}".encode()
    for part in (day, region, service, "aws4_request"):
        made = hmac.digest(made, part.encode(), "sha256")
    return made


def is_presigned(query: bytes) -> bool:
    return any(part in query for part in _PRESIGNED)


def _check_names(names: list[bytes], fields: Mapping[bytes, bytes]) -> None:
    """Raise AccessDenied unless every field that must be signed is."""
    if b"host" not in names:
        raise IncompleteSignature("'Host' must be a 'SignedHeader' in the AWS Authorization.")
    if not _TIME.fullmatch(fields.get(_DATE, b"")) or _DATE not in names:
        raise IncompleteSignature(
            "Authorization header requires a signed 'X-Amz-Date' of the form YYYYMMDD'T'HHMMSS'Z'."
        )
    unsigned = [name for name in fields if name.startswith(_MUST_BE_SIGNED) and name not in names]
    if unsigned:
        listed = b", ".join(unsigned).decode("latin-1")[:256]
        raise InvalidSignature(f"There were headers present in the request which were not signed: {listed}")


def _canonical_request(request: Request, names: list[bytes], fields: Mapping[bytes, bytes], joined: bytes) -> bytes:
    """Return the canonical request without its last line, the body's hash."""
    lines = [request.method, _canonical_path(request.path), _canonical_query(request.query)]
    for name in names:
        value = fields.get(name)
        if value is None:  # absent, or kept elsewhere in the request: the signature does not match
            value = request.host if name == b"host" else _length(request) if name == b"content-length" else b""
        lines.append(b"%b:%b" % (name, b" ".join(value.split())))
    lines += (b"", joined, b"")
    return b"\n".join(lines)


def _canonical_path(path: bytes) -> bytes:
    """Return the path without empty, `.` and `..` segments, encoded once more, as every service but S3 does."""
    if b"//" in path or b"/." in path:
        kept: list[bytes] = []
        for segment in path.split(b"/"):
            if segment == b"..":
                del kept[-1:]
            elif segment not in (b"", b"."):
                kept.append(segment)
        path = b"/%b%b" % (b"/".join(kept), b"/" if kept and path.endswith(b"/") else b"")
    return quote(path, safe="/~").encode()


def _canonical_query(query: bytes) -> bytes:
    if not query:
        return b""
    pairs = sorted(part.partition(b"=")[::2] for part in query.split(b"&"))
    return b"&".join(b"%b=%b" % pair for pair in pairs)


def _length(request: Request) -> bytes:
    return b"" if request.content_length is None else b"%d" % request.content_length


def _read_time(text: bytes) -> float:
    try:
        return timegm(strptime(text.decode(), _TIME_FORM))
    except ValueError as error:
        raise IncompleteSignature(f"X-Amz-Date {text.decode()} is not a time.") from error


def _write_time(seconds: float) -> str:
    return strftime(_TIME_FORM, gmtime(seconds))


def _why_incomplete(authorization: bytes) -> AccessDenied:
    """Return the error that names each missing part, as AWS does."""
    text = authorization.decode("latin-1")
    missing = [part for part in ("Credential", "Signature", "SignedHeaders") if f"{part}=" not in text]
    reasons = " ".join(f"Authorization header requires '{part}' parameter." for part in missing)
    return IncompleteSignature(f"{reasons or 'Authorization header cannot be read.'} Expected: {_EXAMPLE}")
