"""Settings of notifications about the end of asynchronous requests: webhooks and SNS topics."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from torchmoor.config.group import Count, Positive, SettingsGroup, Texts
from torchmoor.config.objects import check_networks

_SECRET_BYTES = range(24, 65)  # what the Standard Webhooks specification allows


class Webhook(SettingsGroup, title="webhook"):
    """An address that is notified of each request's end. secret: whsec_ and the base64 of 24 to 64 bytes."""

    url: str
    secret: str = Field(repr=False)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            is_sound = parts.scheme in ("https", "http") and parts.hostname and parts.port != 0
        except ValueError:
            is_sound = False
        if not is_sound or parts.username is not None or parts.password is not None:
            raise ValueError("must be a webhook's address, https://host/path, without a user name or password in it")
        return url

    @field_validator("secret")
    @classmethod
    def _check_secret(cls, secret: str) -> str:
        if len(_decode(secret)) not in _SECRET_BYTES:
            raise ValueError(
                "must be a webhook's secret, whsec_ followed by the base64 of 24 to 64 bytes: "
                "echo whsec_$(openssl rand -base64 32)"
            )
        return secret

    @property
    def key(self) -> bytes:
        """The secret's bytes."""
        return _decode(self.secret)


class NotificationSettings(SettingsGroup, title="notices"):
    """Webhooks, in addition to an endpoint's SNS topics, and retries of notifications."""

    webhooks: Annotated[tuple[Webhook, ...], Field(strict=False)] = Field(
        (), description="Addresses with their secrets: `{url: https://..., secret: whsec_...}`."
    )
    private_networks: Texts = Field((), description="Private networks in which webhooks may be, also with http.")
    aws_region: str = Field("us-east-1", description="awsRegion of messages for an endpoint without an SNS topic.")
    max_attempts: Count = Field(5, description="Attempts to deliver a notification.")
    first_delay_s: Positive = Field(
        0.5, description="Wait before the second attempt; each further wait is twice as long."
    )
    max_delay_s: Positive = Field(30.0, description="Longest wait before an attempt.")
    max_in_flight: Count = Field(
        16,
        description="Deliveries at a time to one webhook, or to the topics of one region; a delivery includes the "
        "waits between its attempts.",
    )
    connect_timeout_s: Positive = Field(5.0, description="Time-out of a connection to a receiver.")
    timeout_s: Positive = Field(15.0, description="Time-out of one attempt.")

    _check_networks = field_validator("private_networks")(check_networks)


def _decode(secret: str) -> bytes:
    try:
        return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        return b""
