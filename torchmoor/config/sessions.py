"""Settings of session ids: the keys that sign them."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from torchmoor.config.group import SettingsGroup
from torchmoor.errors import ConfigError
from torchmoor.wire.session_ids import KEYS_VARIABLE, parse_session_keys


class SessionIdSettings(SettingsGroup, title="session"):
    """Keys that session ids are signed with, by key id. Handlers sign with the first key; each key verifies.

    Without a key no session id can be verified, and every session id is refused.
    """

    keys: dict[str, bytes] = Field({}, repr=False, description="Signing keys.")
    are_journaled: bool = Field(
        False, description="The instances share a journal, so that any of them can continue a session."
    )

    @classmethod
    def parse(cls, text: str, *, are_journaled: bool = False) -> Self:
        """Read `kid:hexkey[,kid:hexkey...]`, the form of TORCHMOOR_SESSION_KEYS. Raises ConfigError."""
        given = text.strip(", \t\r\n")
        try:
            return cls(keys=parse_session_keys(given) if given else {}, are_journaled=are_journaled)
        except ValueError as error:
            raise ConfigError(f"{KEYS_VARIABLE} {error}") from error
