"""Session ids: their format, the MAC that shows that a fleet minted them, and the hash that names them in logs.

    ts-seq-{nonce}-{expiry}-{instance}-{key id}{mac}

nonce: 16 characters base32, which begin with the expiry's fraction of a second; expiry: 8 hexadecimal digits, seconds
since 1970; instance: the stable name of the instance that opened the session; key id: 2 characters; mac: the first 16
bytes of HMAC-SHA256 in base32, 26 characters. All lower case. The MAC covers the other parts, the endpoint and the
caller.
"""

import hmac
import re
import secrets
from base64 import b32encode
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import NamedTuple

MAX_ID_LENGTH = 256
MAX_INSTANCE_LENGTH = 63
NONCE_BYTES = 10
MIN_KEY_BYTES = 16
KEYS_VARIABLE = "TORCHMOOR_SESSION_KEYS"  # the form that parse_session_keys reads
INSTANCE_VARIABLE = "TORCHMOOR_INSTANCE"

_CONTEXT = "torchmoor-session-v1"
_FRACTION_BYTES = 2  # of the nonce
_MAC_BYTES = 16
PREFIX = "ts-seq-"
_EXPIRY_CHARS = 8
_KEY_ID_CHARS = 2
_NONCE_CHARS = -(-8 * NONCE_BYTES // 5)  # base32: five bits each
_MAC_CHARS = -(-8 * _MAC_BYTES // 5)

# Positions of the parts; a hyphen is between two of them, and the key id and the MAC are one.
_NONCE = slice(len(PREFIX), len(PREFIX) + _NONCE_CHARS)
_EXPIRY = slice(_NONCE.stop + 1, _NONCE.stop + 1 + _EXPIRY_CHARS)
_KEY_ID = slice(-_MAC_CHARS - _KEY_ID_CHARS, -_MAC_CHARS)
_INSTANCE = slice(_EXPIRY.stop + 1, _KEY_ID.start - 1)

# matches every id that a torchmoor handler minted; the first group is its expiry
ID_FORM = re.compile(rf"{PREFIX}[a-z2-7]{{{_NONCE_CHARS}}}-([0-9a-f]{{{_EXPIRY_CHARS}}})-[a-z0-9-]{{1,200}}", re.ASCII)
_SORTED_BASE32 = str.maketrans("abcdefghijklmnopqrstuvwxyz234567", "0123456789abcdefghijklmnopqrstuv")
_EXPIRY_FORM = re.compile(rf"[0-9a-f]{{{_EXPIRY_CHARS}}}", re.ASCII)
_INSTANCE_FORM = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*", re.ASCII)  # without ambiguity, so linear
_KEY_ID_FORM = re.compile(rf"[a-z0-9]{{{_KEY_ID_CHARS}}}")

SESSION_HASH = re.compile("[0-9a-f]{16}")
SESSION_HASH_PREFIX = re.compile("[0-9a-f]{0,16}")


class SessionId(NamedTuple):
    """The parts of an id. expires_at: seconds since 1970, 0 if unknown.

    key_id: empty for an id that another handler minted in a format of its own.
    """

    text: str
    instance: str
    expires_at: int
    key_id: str

    @property
    def is_foreign(self) -> bool:
        """True if the id has no MAC, so that only the instance that opened the session can serve it."""
        return not self.key_id


def mint(
    keys: Mapping[str, bytes],
    *,
    instance: str,
    expires_at: float,
    endpoint: str,
    principal: str = "",
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> SessionId:
    """Make a new id that cannot be guessed, signed with the first of the keys. The session ends at the full second."""
    key_id, key = next(iter(keys.items()))
    second = int(expires_at)
    fraction = int((expires_at - second) * 256**_FRACTION_BYTES).to_bytes(_FRACTION_BYTES, "big")
    nonce, expiry = _base32(fraction + random_bytes(NONCE_BYTES)[_FRACTION_BYTES:]), f"{second:08x}"
    text = compose(
        key, endpoint=endpoint, principal=principal, nonce=nonce, expiry=expiry, instance=instance, key_id=key_id
    )
    return SessionId(text, instance, second, key_id)


def expiry_order(text: str) -> tuple[str, str, str]:
    """Return a key that sorts ids by their expiry and its fraction of a second."""
    return text[_EXPIRY], text[_NONCE].translate(_SORTED_BASE32), text


def verify(text: str, keys: Mapping[str, bytes], *, endpoint: str, principal: str = "") -> SessionId | None:
    """Read an id that was minted for this endpoint and caller with one of the keys; None for any other text.

    The parts are found by position: all but the instance's name have a fixed length. The id is composed again from its
    parts and compared, so that only its canonical spelling is accepted.
    """
    if len(text) > MAX_ID_LENGTH or not text.isascii():
        return None
    nonce, expiry, instance, key_id = text[_NONCE], text[_EXPIRY], text[_INSTANCE], text[_KEY_ID]
    key = keys.get(key_id)
    if key is None or not is_instance_name(instance) or not _EXPIRY_FORM.fullmatch(expiry):
        return None
    canonical = compose(
        key, endpoint=endpoint, principal=principal, nonce=nonce, expiry=expiry, instance=instance, key_id=key_id
    )
    if not hmac.compare_digest(canonical, text):
        return None
    return SessionId(text, instance, int(expiry, 16), key_id)


def compose(key: bytes, *, endpoint: str, principal: str, nonce: str, expiry: str, instance: str, key_id: str) -> str:
    """Compose an id from its parts and sign it. The key must be the one with the key id."""
    message = "\n".join((_CONTEXT, endpoint, principal, nonce, expiry, instance, key_id)).encode()
    mac = hmac.digest(key, message, "sha256")[:_MAC_BYTES]
    return f"{PREFIX}{nonce}-{expiry}-{instance}-{key_id}{_base32(mac)}"


def find_key(text: str, keys: Mapping[str, bytes]) -> bytes | None:
    """Return the key with the key id in this session id; None if it is not among these."""
    return keys.get(text[_KEY_ID])


def is_instance_name(name: str) -> bool:
    """Return True for at most 63 lower-case letters, digits and single hyphens between them."""
    return len(name) <= MAX_INSTANCE_LENGTH and _INSTANCE_FORM.fullmatch(name) is not None


def parse_session_keys(text: str) -> dict[str, bytes]:
    """Read `kid:hexkey[,kid:hexkey...]`, in order. Raises ValueError, whose text never shows a key."""
    keys: dict[str, bytes] = {}
    for item in text.split(","):
        key_id, _, digits = item.strip().partition(":")
        if key_id in keys:
            raise ValueError(f"has two keys of the kid {key_id!r}")
        try:
            key = bytes.fromhex(digits)
        except ValueError:
            key = b""
        if not _KEY_ID_FORM.fullmatch(key_id) or len(key) < MIN_KEY_BYTES:
            which = f", unlike that of {key_id}" if _KEY_ID_FORM.fullmatch(key_id) else ""
            raise ValueError(f"must be kid:hexkey[,...]; a kid has 2 characters, a key 16 bytes or more{which}")
        keys[key_id] = key
    return keys


def _base32(data: bytes) -> str:
    return b32encode(data).decode("ascii").rstrip("=").lower()


def session_hash(session_id: str | bytes) -> str:
    """Hash a session id. An id is a credential and must not appear in logs; its hash may."""
    data = session_id if isinstance(session_id, bytes) else session_id.encode()
    return blake2b(data, digest_size=8).hexdigest()
