"""Receipts: the response headers that name an answer's instance, its routing and its cost (docs/runtime-api.md)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from torchmoor.wire import headers as wire

TEXT_FIELDS = {
    wire.INSTANCE: "instance",
    wire.INVOKED_VARIANT: "variant",  # may be named 1
    wire.INVOKED_ROUTING_REASON: "routing_reason",
    "x-amzn-requestid": "request_id",
    wire.CACHE_TIER: "cache_tier",
}
NUMBER_FIELDS = {name: name.removeprefix(wire.TORCHMOOR_PREFIX).replace("-", "_") for name in wire.RECEIPT_NUMBERS}
MAX_DIGITS = 18


def read_receipt(headers: Mapping[str, str]) -> dict[str, str | int | float]:
    """Return the receipt's fields; one whose number cannot be read is left out."""
    given = {name.lower(): value for name, value in headers.items()}
    texts = {field: given[name] for name, field in TEXT_FIELDS.items() if name in given}
    numbers = {field: _read_number(given[name]) for name, field in NUMBER_FIELDS.items() if name in given}
    return {**texts, **{field: number for field, number in numbers.items() if number is not None}}


def _read_number(text: str) -> int | float | None:
    """Return the number; None if it is not a finite number."""
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
