"""The ids that this worker mints for its sessions, with its fleet's keys and its own name."""

import os
import secrets
from collections.abc import Callable, Mapping

from handlers.errors import SettingsError
from handlers.requests.incoming import Caller
from torchmoor.wire.session_ids import (
    INSTANCE_VARIABLE,
    KEYS_VARIABLE,
    SessionId,
    is_instance_name,
    mint,
    parse_session_keys,
    verify,
)


class SessionIdMinter:
    """Mints and verifies ids. The first of the keys signs."""

    def __init__(
        self, keys: Mapping[str, bytes], instance: str, random_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> None:
        self.keys = dict(keys)
        self._random_bytes = random_bytes
        self.instance = instance

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "SessionIdMinter":
        """Read the keys and the instance's name from the environment. Without keys, make a private one.

        Raises SettingsError if a variable is malformed.
        """
        instance = environ.get(INSTANCE_VARIABLE) or "local"
        if not is_instance_name(instance):
            raise SettingsError(f"{INSTANCE_VARIABLE} must be lower-case letters, digits, single hyphens: {instance!r}")
        text = environ.get(KEYS_VARIABLE)
        try:
            return cls(parse_session_keys(text) if text else {"k0": os.urandom(32)}, instance)
        except ValueError as exc:
            raise SettingsError(f"{KEYS_VARIABLE} {exc}") from exc

    def mint(self, expires_at: float, caller: Caller) -> SessionId:
        """Make a new id for this caller. expires_at: seconds since 1970."""
        return mint(
            self.keys,
            instance=self.instance,
            expires_at=expires_at,
            endpoint=caller.endpoint,
            principal=caller.principal,
            random_bytes=self._random_bytes,
        )

    def verify(self, text: str, caller: Caller) -> SessionId | None:
        """Read an id; None unless this fleet minted it for this caller."""
        return verify(text, self.keys, endpoint=caller.endpoint, principal=caller.principal)
