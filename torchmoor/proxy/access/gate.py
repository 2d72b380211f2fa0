"""Authentication of every request, before anything else reads it.

A bearer token is checked with the head alone. A signature covers the body, so a signed request gets a `BodyCheck` and
is forwarded only after the check of its whole body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from hashlib import blake2b, sha256

from torchmoor.config.access import AccessSettings
from torchmoor.config.credentials import Credentials
from torchmoor.errors import (
    AccessDenied,
    ApiError,
    BodyTooLarge,
    IncompleteSignature,
    InvalidSignature,
    MissingCredentials,
    UnrecognizedClient,
    ValidationError,
)
from torchmoor.proxy.access.sagemaker_token import TOKEN_PREFIX, verify_token
from torchmoor.proxy.access.sigv4 import ALGORITHM, UNSIGNED_PAYLOAD, Signed, SigV4, is_presigned
from torchmoor.proxy.http.message import Request

BEARER = b"bearer "


class SignedBody:
    """Checks the body of a signed request; its BodyCheck."""

    __slots__ = ("max_body_bytes", "is_head_verified", "_gate", "_signed")

    def __init__(self, gate: Gate, signed: Signed, *, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.is_head_verified = signed.declared_hash is not None
        self._gate = gate
        self._signed = signed

    def verify(self, body: bytes) -> None:
        """Raise AccessDenied, and count it, unless this is the body that was signed."""
        try:
            self._signed.verify_body(body)
        except AccessDenied as error:
            self._gate.count(error)
            raise


class Gate:
    """Checks requests against the configured keys and tokens.

    num_denied: requests refused for their credentials, by kind of error.
    """

    def __init__(self, settings: AccessSettings, credentials: Credentials, *, wall: Callable[[], float]) -> None:
        """wall: seconds since 1970."""
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
        # A lookup by hash takes the same time for every wrong token.
        self._token_principals = {
            sha256(token.encode()).digest(): principal_of("token", name) for name, token in credentials.tokens.items()
        }

    def admit(self, request: Request) -> None:
        """Set the request's principal, and its body check if it needs one. Raises ApiError, and counts a denial."""
        if request.is_admitted:
            return
        try:
            signed = self._check_head(request)
        except AccessDenied as error:
            self.count(error)
            raise
        if signed is not None:
            request.body_check = SignedBody(self, signed, max_body_bytes=self._settings.max_signed_body_bytes)

    def try_admit(self, request: Request, body: bytes) -> bool:
        """Admit a request with its whole body, or return False and count nothing: `admit` then gives the error."""
        try:
            signed = self._check_head(request)
            if signed is not None:
                signed.verify_body(body)
        except ApiError:
            request.principal = ""
            return False
        request.is_admitted = True
        return True

    def _check_head(self, request: Request) -> Signed | None:
        """Set the request's principal. Returns the signature that its body must match, if any. Raises ApiError."""
        authorization = _find_authorization(request)
        if authorization.startswith(ALGORITHM):
            return self._check_signed(request, self._sigv4.read(request, authorization))
        if authorization[: len(BEARER)].lower() == BEARER:
            request.principal = self._find_token(authorization[len(BEARER) :].strip())
            return None
        if authorization:
            scheme = authorization.partition(b" ")[0].decode("latin-1")[:32]
            raise IncompleteSignature(f"Authorization by {scheme!r} is not known here: use AWS4-HMAC-SHA256 or Bearer.")
        if is_presigned(request.query):
            raise IncompleteSignature(
                "Signatures in the query (presigned URLs) are not accepted: sign in the Authorization header."
            )
        raise MissingCredentials()

    def admit_again(self, request: Request) -> None:
        """Check that a caller who was admitted before still has access. Raises AccessDenied.

        A token is looked up again; a signature covers the first request only, so its key must still be configured.
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

    def _check_signed(self, request: Request, signed: Signed) -> Signed | None:
        settings = self._settings
        declared, length = signed.declared_hash, request.content_length
        if declared is not None:
            signed.verify(declared)
        request.principal = self._key_principals[signed.access_key]
        if declared == UNSIGNED_PAYLOAD:
            if not settings.allows_unsigned_payload:
                raise InvalidSignature(
                    "UNSIGNED-PAYLOAD is not accepted here: give your client the body as bytes, not as a stream, so "
                    "that it signs the body's hash."
                )
            return None
        limit = settings.max_signed_body_bytes
        if length is not None and length > limit:
            raise _signed_body_too_long(limit)
        if request.is_chunked or length:
            return signed
        signed.verify_body(b"")
        return None

    def count(self, error: AccessDenied) -> None:
        """Count a refused access."""
        self.num_denied[error.kind] += 1


def body_too_large(request: Request, limit: int) -> ValidationError:
    """Return the error of a body above a limit of its API, or of signed bodies."""
    check = request.body_check
    return BodyTooLarge(limit) if check is None or check.max_body_bytes > limit else _signed_body_too_long(limit)


def _signed_body_too_long(limit: int) -> ValidationError:
    return ValidationError(
        f"A signed body may have up to {limit} bytes; a longer one needs a bearer token, if its API allows the length."
    )


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
