"""Credentials that callers are checked against: access keys, bearer tokens and the admin plane's token."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, model_validator

from torchmoor.config.group import SettingsGroup
from torchmoor.errors import ConfigError

MIN_SECRET_CHARS = 16
_KEY_ID = re.compile(r"[A-Za-z0-9_]{3,128}", re.ASCII)
_SECRET = re.compile(r"[\x21-\x7e]+", re.ASCII)


class AccessKey(SettingsGroup, title="access key"):
    """The secret of an access key id, and the session token that requests must send with it, if any."""

    secret: str = Field(repr=False)
    session_token: str = Field("", repr=False)


class Credentials(SettingsGroup, title="credentials"):
    """Access keys by their ids, bearer tokens by the names of their owners, and the admin plane's token.

    Without keys and tokens the data plane accepts every caller; without an admin token the admin plane does.
    """

    keys: dict[str, AccessKey] = Field({}, repr=False)
    tokens: dict[str, str] = Field({}, repr=False)
    admin_token: str = Field("", repr=False)

    @model_validator(mode="after")
    def _check_secrets(self) -> Self:
        """Raise ConfigError without quoting a secret."""
        for key_id, key in self.keys.items():
            if not _KEY_ID.fullmatch(key_id):
                raise ConfigError("access keys: an id must be 3 to 128 letters, digits or underscores")
            _require_secret(key.secret, f"access keys: the secret of {key_id}")
        owners: dict[str, str] = {}
        for name, token in self.tokens.items():
            if not _KEY_ID.fullmatch(name):
                raise ConfigError("tokens: a name must be 3 to 128 letters, digits or underscores")
            _require_secret(token, f"tokens: the token of {name}")
            if (owner := owners.setdefault(token, name)) != name:
                raise ConfigError(f"tokens: {owner} and {name} have the same token")
        if self.admin_token:
            _require_secret(self.admin_token, "the admin token")
        return self

    @property
    def guards_data(self) -> bool:
        """True if the data plane requires credentials."""
        return bool(self.keys or self.tokens)


def _require_secret(secret: str, subject: str) -> None:
    """Raise ConfigError unless a secret fits into a header and is long enough."""
    if len(secret) < MIN_SECRET_CHARS or not _SECRET.fullmatch(secret):
        raise ConfigError(f"{subject} must have at least {MIN_SECRET_CHARS} visible ASCII characters")
