"""Authentication of every request, before anything else reads it.

A bearer token is checked with the head alone. A signature covers the body, so the request gets a `BodyCheck` and is not
sent on before that has seen the whole body. The bytes that wait for their check are limited over all requests
(torchmoor.proxy.access.unverified).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from hashlib import blake2b, sha256
from time import monotonic

from torchmoor.config.access import AccessSettings, Credentials
from torchmoor.errors import (
    AccessDenied,
    IncompleteSignature,
    InvalidSignature,
    MissingCredentials,
    ServiceUnavailable,
    UnrecognizedClient,
    ValidationError,
)
from torchmoor.proxy.access.sagemaker_token import TOKEN_PREFIX, verify_token
from torchmoor.proxy.access.sigv4 import ALGORITHM, EMPTY_HASH, UNSIGNED_PAYLOAD, Signed, SigV4, is_presigned
from torchmoor.proxy.access.unverified import UnverifiedBodies, UnverifiedBody, source_of
from torchmoor.proxy.http.message import Request

BEARER = b"bearer "


class SignedBody:
    """Checks the body of a signed request; its BodyCheck."""

    __slots__ = ("max_body_bytes", "_gate", "_signed", "_principal", "_unverified")

    def __init__(self, gate: Gate, signed: Signed, principal: str, *, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._gate = gate
        self._signed = signed
        self._principal = principal
        self._unverified: UnverifiedBody | None = None  # until the first bytes are held

    def hold(self, num_bytes: int, address: str, drop: Callable[[], None]) -> None:
        """Count what was received for the client's address, or for the caller if the head's signature was verified."""
        if not num_bytes:
            return
        body = self._unverified
        if body is None:
            is_verified = self._signed.declared_hash is not None
            body = self._unverified = UnverifiedBody(self._principal if is_verified else source_of(address), drop)
        self._gate.unverified.add(body, num_bytes - body.num_bytes)

    def verify(self, body: bytes) -> None:
        """Raise AccessDenied unless this is the body that was signed."""
        self.release()
        body_hash = sha256(body).hexdigest().encode()
        try:
            declared = self._signed.declared_hash
            if declared is None:
                self._signed.verify(body_hash)
            elif declared != body_hash:
                raise InvalidSignature("The provided 'x-amz-content-sha256' header does not match what was computed.")
        except AccessDenied as error:
            self._gate.count(error)
            raise

    def release(self) -> None:
        """Stop counting the body's bytes; further calls do nothing."""
        body, self._unverified = self._unverified, None
        if body is not None:
            self._gate.unverified.remove(body)


class Gate:
    """Checks requests against the configured keys and tokens.

    unverified: the bodies that wait for their check. num_denied: requests refused for their credentials, by kind of
    error; ServiceUnavailable for those that were dropped before their signature could be checked.
    """

    def __init__(self, settings: AccessSettings, credentials: Credentials, *, wall: Callable[[], float]) -> None:
        """wall: seconds since 1970."""
        self.unverified = UnverifiedBodies(
            settings.max_unverified_bytes, clock=monotonic, on_dropped=self._count_dropped
        )
        self.num_denied: Counter[str] = Counter()
        self._settings = settings
        self._wall = wall
        self.take(credentials)

    def take(self, credentials: Credentials) -> None:
        """Use these credentials from now on; requests that are admitted already keep the old ones."""
        settings = self._settings
        self._sigv4 = SigV4(
            credentials.keys, region=settings.region, clock_skew_s=settings.clock_skew_s, wall=self._wall
        )
        self._key_principals = {key_id: principal_of("key", key_id) for key_id in credentials.keys}
        # A lookup by hash takes the same time however much of a token is right.
        self._token_principals = {
            sha256(token.encode()).digest(): principal_of("token", name) for name, token in credentials.tokens.items()
        }

    def admit(self, request: Request) -> None:
        """Set the request's principal, and its body check if it needs one. Raises ApiError."""
        try:
            authorization = _find_authorization(request)
            if authorization.startswith(ALGORITHM):
                self._admit_signed(request, self._sigv4.read(request, authorization))
            elif authorization[: len(BEARER)].lower() == BEARER:
                request.principal = self._find_token(authorization[len(BEARER) :].strip())
            elif authorization:
                scheme = authorization.partition(b" ")[0].decode("latin-1")[:32]
                raise IncompleteSignature(
                    f"Authorization by {scheme!r} is not known here: use AWS4-HMAC-SHA256 or Bearer."
                )
            elif is_presigned(request.query):
                raise IncompleteSignature(
                    "Signatures in the query (presigned URLs) are not accepted: sign in the Authorization header."
                )
            else:
                raise MissingCredentials()
        except AccessDenied as error:
            self.count(error)
            raise

    def admit_again(self, request: Request) -> None:
        """Check that a caller who was admitted before still has access. Raises AccessDenied.

        A token is looked up again; a signature covers the first request only, so its key must still be there.
        """
        try:
            authorization = _find_authorization(request)
            if authorization[: len(BEARER)].lower() == BEARER:
                self._find_token(authorization[len(BEARER) :].strip())
            elif request.principal not in self._key_principals.values():
                raise UnrecognizedClient()
        except AccessDenied as error:
            self.count(error)
            raise

    def _find_token(self, token: bytes) -> str:
        principal = self._token_principals.get(sha256(token).digest())
        if principal is not None:
            return principal
        if token.startswith(TOKEN_PREFIX):
            return self._key_principals[verify_token(token, self._sigv4)]
        raise UnrecognizedClient()

    def _admit_signed(self, request: Request, signed: Signed) -> None:
        settings = self._settings
        declared, length = signed.declared_hash, request.content_length
        if declared is not None:
            signed.verify(declared)
        request.principal = self._key_principals[signed.access_key]
        if declared == UNSIGNED_PAYLOAD:
            if not settings.allows_unsigned_payload:
                raise InvalidSignature("UNSIGNED-PAYLOAD is not accepted here: sign the body's hash.")
            return
        limit = settings.max_signed_body_bytes
        if length is not None and length > limit:
            raise ValidationError(f"A signed body may have up to {limit} bytes; send a longer one with a bearer token.")
        if request.is_chunked or length:
            request.body_check = SignedBody(self, signed, request.principal, max_body_bytes=limit)
        elif declared is None:
            signed.verify(EMPTY_HASH)
        elif declared != EMPTY_HASH:
            raise InvalidSignature("The provided 'x-amz-content-sha256' header does not match what was computed.")

    def _count_dropped(self) -> None:
        self.num_denied[ServiceUnavailable.kind] += 1

    def count(self, error: AccessDenied) -> None:
        """Count a refused access."""
        self.num_denied[error.kind] += 1


def _find_authorization(request: Request) -> bytes:
    found = b""
    for field in request.headers:
        if field.name == b"authorization":
            if found:
                raise IncompleteSignature("More than one Authorization header.")
            found = field.value
    return found


def principal_of(kind: str, name: str) -> str:
    """Return the caller's name for instances: the same for all its requests, and without its key's id."""
    return blake2b(f"{kind}:{name}".encode(), digest_size=16).hexdigest()
