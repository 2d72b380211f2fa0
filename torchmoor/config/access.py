"""Settings of access checks."""

from __future__ import annotations

from pydantic import Field

from torchmoor.config.group import MIB, Count, Positive, SettingsGroup


class AccessSettings(SettingsGroup, title="access"):
    """How credentials are checked, if any are configured."""

    keys_file: str = Field("", description="File of access keys and tokens (access.md).")
    region: str = Field("", description="Only region that signatures may name. Empty: any.")
    clock_skew_s: Positive = Field(
        300.0,
        description="Largest difference between a client's clock and the proxy's. A signed request can be replayed "
        "for this time.",
    )
    allows_unsigned_payload: bool = Field(False, description="Accept requests whose signature does not cover the body.")
    max_signed_body_bytes: Count = Field(
        6 * MIB, description="Longest signed body, which is held until it is verified."
    )
