"""Session ids that carry their own proof.

`ts-seq-{nonce}-{expiry}-{instance}-{kid}{mac}`: who minted it, until when it lives, and a MAC over that, the
endpoint and the caller. Anyone with the key can tell a real id from a forged one without asking the instance.
docs/runtime-api.md has the format; the front proxy verifies the same bytes by its own code.
"""

import base64
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from handlers.errors import ConfigError

KEYS_VARIABLE = "TORCHMOOR_SESSION_KEYS"
INSTANCE_VARIABLE = "TORCHMOOR_INSTANCE"
_INSTANCE = re.compile(r"[a-z0-9](?:-?[a-z0-9])*")
_ID = re.compile(r"ts-seq-([a-z2-7]{16})-([0-9a-f]{8})-([a-z0-9](?:-?[a-z0-9])*)-([a-z0-9]{2})([a-z2-7]{26})")


@dataclass(frozen=True, slots=True)
class SessionId:
    """A verified id: its text, when it expires (seconds since 1970, UTC), and the instance that minted it."""

    text: str
    expires_at: int
    instance: str


class SessionIds:
    """Mints and verifies ids with a set of keys, of which the first signs."""

    def __init__(
        self, keys: Mapping[str, bytes], instance: str, random_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> None:
        self._keys = dict(keys)
        self._signer = next(iter(self._keys))
        self._random_bytes = random_bytes
        self.instance = instance

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "SessionIds":
        """Keys and instance name as the launcher gives them; alone under TorchServe, a key of this process's own.

        Raises ConfigError if the variables are not of the documented form.
        """
        instance = environ.get(INSTANCE_VARIABLE) or "local"
        if not _INSTANCE.fullmatch(instance) or len(instance) > 63:
            raise ConfigError(f"{INSTANCE_VARIABLE} must be lower-case letters, digits, single hyphens: {instance!r}")
        text = environ.get(KEYS_VARIABLE)
        return cls(_parse_keys(text) if text else {"k0": os.urandom(32)}, instance)

    def mint(self, expires_at: int, endpoint: str, principal: str) -> SessionId:
        """A new id that nobody can guess."""
        nonce = _base32(self._random_bytes(10))
        text = self._compose(nonce, f"{expires_at:08x}", self.instance, self._signer, endpoint, principal)
        return SessionId(text, expires_at, self.instance)

    def verify(self, text: str, endpoint: str, principal: str) -> SessionId | None:
        """What the id says, or None unless this fleet minted it for this endpoint and caller."""
        match = _ID.fullmatch(text)
        if match is None:
            return None
        nonce, expiry, instance, kid, _ = match.groups()
        if kid not in self._keys:
            return None
        expected = self._compose(nonce, expiry, instance, kid, endpoint, principal)
        if not hmac.compare_digest(expected, text):
            return None
        return SessionId(text, int(expiry, 16), instance)

    def _compose(self, nonce: str, expiry: str, instance: str, kid: str, endpoint: str, principal: str) -> str:
        fields = ("torchmoor-session-v1", endpoint, principal, nonce, expiry, instance, kid)
        digest = hmac.digest(self._keys[kid], "\n".join(fields).encode(), hashlib.sha256)
        return f"ts-seq-{nonce}-{expiry}-{instance}-{kid}{_base32(digest[:16])}"


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _parse_keys(text: str) -> dict[str, bytes]:
    keys = {}
    for item in text.split(","):
        kid, _, key = item.strip().partition(":")
        if kid in keys:
            raise ConfigError(f"{KEYS_VARIABLE} has two keys of the kid {kid!r}")
        try:
            keys[kid] = bytes.fromhex(key)
        except ValueError:
            keys[kid] = b""
        if not re.fullmatch(r"[a-z0-9]{2}", kid) or len(keys[kid]) < 16:
            raise ConfigError(f"{KEYS_VARIABLE} must be kid:hexkey[,...]; a kid has 2 characters, a key 16 bytes")
    return keys
