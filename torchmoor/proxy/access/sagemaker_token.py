"""Verification of SageMaker's own bearer tokens, which AWS's token generator makes from an access key.

A token is `sagemaker-api-key-` and the base64 of a presigned POST to https://sagemaker.amazonaws.com/, without the
scheme and with `&Version=1` after the signature. The signature covers the token only, not the request that carries it.
Source: sagemaker-core 2.27, sagemaker.core.token_generator; AWS, "Authenticating requests: using query parameters".
"""

from __future__ import annotations

import re
from base64 import b64decode
from urllib.parse import quote, unquote

from torchmoor.errors import InvalidSignature, UnrecognizedClient
from torchmoor.proxy.access.sigv4 import ALGORITHM, EMPTY_HASH, Signed, SigV4, make_signing_key

TOKEN_PREFIX = b"sagemaker-api-key-"
MAX_LIFETIME_S = 12 * 3600

_HOST = "sagemaker.amazonaws.com"
_FORM = re.compile(rf"{re.escape(_HOST)}/\?(?P<query>[^?#]+)&Version=1", re.ASCII)
_CREDENTIAL = re.compile(r"[^/]+/\d{8}/[a-z0-9-]+/sagemaker/aws4_request", re.ASCII)
_SECONDS = re.compile(r"[1-9]\d{0,4}", re.ASCII)
_SIGNATURE = re.compile(r"[0-9a-f]{64}", re.ASCII)
_TIME = re.compile(r"\d{8}T\d{6}Z", re.ASCII)
_FIXED = {
    "Action": "CallWithBearerToken",
    "X-Amz-Algorithm": ALGORITHM.decode(),
    "X-Amz-SignedHeaders": "host",
}
_READ = {
    "X-Amz-Credential": _CREDENTIAL,
    "X-Amz-Date": _TIME,
    "X-Amz-Expires": _SECONDS,
    "X-Amz-Signature": _SIGNATURE,
}
_OPTIONAL = "X-Amz-Security-Token"


def verify_token(token: bytes, sigv4: SigV4) -> str:
    """Return the id of the access key that signed a token. Raises AccessDenied."""
    members = _read_members(token)
    key_id, day, region, service, _ = members["X-Amz-Credential"].split("/")
    lifetime_s = int(members["X-Amz-Expires"])
    if lifetime_s > MAX_LIFETIME_S:
        raise InvalidSignature(f"A bearer token may be valid for up to {MAX_LIFETIME_S} seconds, not {lifetime_s}.")
    key = sigv4.find_key(key_id, members.get(_OPTIONAL, "").encode())
    sigv4.check_region(region)
    time = members["X-Amz-Date"].encode()
    sigv4.check_time(time, day, lifetime_s)
    signature = members.pop("X-Amz-Signature").encode()
    query = _encode(dict(sorted(members.items())))
    canonical = f"POST\n/\n{query}\nhost:{_HOST}\n\nhost\n".encode()
    signed = Signed(
        key_id,
        None,
        canonical,
        time=time,
        scope=f"{day}/{region}/{service}/aws4_request".encode(),
        signing_key=make_signing_key(key.secret, day, region, service),
        signature=signature,
    )
    signed.verify(EMPTY_HASH)
    return key_id


def _read_members(token: bytes) -> dict[str, str]:
    """Decode a token and check that its URL has the documented form. Raises UnrecognizedClient."""
    try:
        url = b64decode(token[len(TOKEN_PREFIX) :], validate=True).decode("ascii")
    except ValueError as error:
        raise UnrecognizedClient() from error
    form = _FORM.fullmatch(url)
    if form is None:
        raise UnrecognizedClient()
    pairs = [part.partition("=")[::2] for part in form["query"].split("&")]
    members = {name: unquote(value) for name, value in pairs}
    is_documented = (
        len(members) == len(pairs)
        and form["query"] == _encode(members)
        and members.keys() - {_OPTIONAL} == _FIXED.keys() | _READ.keys()
        and all(members[name] == value for name, value in _FIXED.items())
        and all(pattern.fullmatch(members[name]) for name, pattern in _READ.items())
    )
    if not is_documented:
        raise UnrecognizedClient()
    return members


def _encode(members: dict[str, str]) -> str:
    return "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in members.items())
