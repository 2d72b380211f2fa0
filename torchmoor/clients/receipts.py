"""Receipts: the response headers that name an answer's instance, its routing and its cost (docs/runtime-api.md)."""

from __future__ import annotations

from collections.abc import Mapping

from torchmoor.wire import headers as wire
from torchmoor.wire.receipt_numbers import NUMBER_FIELDS, read_number

TEXT_FIELDS = {
    wire.INSTANCE: "instance",
    wire.INVOKED_VARIANT: "variant",  # may be named 1
    wire.INVOKED_ROUTING_REASON: "routing_reason",
    "x-amzn-requestid": "request_id",
    wire.CACHE_TIER: "cache_tier",
}


def read_receipt(headers: Mapping[str, str]) -> dict[str, str | int | float]:
    """Return the receipt's fields; one whose number cannot be read is left out."""
    given = {name.lower(): value for name, value in headers.items()}
    texts = {field: given[name] for name, field in TEXT_FIELDS.items() if name in given}
    numbers = {field: read_number(given[name]) for name, field in NUMBER_FIELDS.items() if name in given}
    return {**texts, **{field: number for field, number in numbers.items() if number is not None}}
