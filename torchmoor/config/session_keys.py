"""Settings of session ids: the keys that sign them."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, field_validator

from torchmoor.config.group import SettingsGroup
from torchmoor.errors import ConfigError

_KEY_ID = re.compile(r"[a-z0-9]{2}")
MIN_KEY_BYTES = 16


class SessionSettings(SettingsGroup, title="session"):
    """Keys that session ids are signed with, by key id. Handlers sign with the first key; each key verifies.

    Without a key no session id can be verified, and every session id is refused.
    """

    keys: Annotated[dict[str, bytes], Field(repr=False)] = Field({}, repr=False, description="Signing keys.")
    are_journaled: bool = Field(False, description="The instances share a journal, so each can take over a session.")

    @field_validator("keys")
    @classmethod
    def _check_keys(cls, keys: dict[str, bytes]) -> dict[str, bytes]:
        for key_id, key in keys.items():
            if not _KEY_ID.fullmatch(key_id):
                raise ValueError(f"must have key ids of two characters of a-z, 0-9, not {key_id!r}")
            if len(key) < MIN_KEY_BYTES:
                raise ValueError(f"must have {MIN_KEY_BYTES} bytes or more in key {key_id!r}, not {len(key)}")
        return keys

    @classmethod
    def parse(cls, text: str, *, are_journaled: bool = False) -> Self:
        """Read `kid:hexkey[,kid:hexkey...]`, the form of TORCHMOOR_SESSION_KEYS. Raises ConfigError."""
        keys: dict[str, bytes] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key_id, _, digits = item.partition(":")
            try:
                keys[key_id] = bytes.fromhex(digits)
            except ValueError as error:
                raise ConfigError(f"session.keys: key {key_id!r} is not hexadecimal") from error
        return cls(keys=keys, are_journaled=are_journaled)
