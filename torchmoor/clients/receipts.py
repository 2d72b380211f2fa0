"""Receipts: the response headers that name an answer's instance, its routing and its cost (docs/runtime-api.md)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from torchmoor.wire import headers as wire

FIELDS = {
    wire.INSTANCE: "instance",
    wire.INVOKED_VARIANT: "variant",
    wire.INVOKED_ROUTING_REASON: "routing_reason",
    "x-amzn-requestid": "request_id",
    wire.CACHE_TIER: "cache_tier",
    wire.CONTEXT_TOKENS: "context_tokens",
    wire.PREFILL_TOKENS: "prefill_tokens",
    wire.GENERATED_TOKENS: "generated_tokens",
    wire.QUEUE_MS: "queue_ms",
    wire.TTFT_MS: "ttft_ms",
    wire.REBUILT_EVENTS: "rebuilt_events",
    wire.DROPPED_TURNS: "dropped_turns",
}
NAMES = frozenset(("instance", "variant", "routing_reason", "request_id", "cache_tier"))  # a variant may be named 1
MAX_DIGITS = 18


def read_receipt(headers: Mapping[str, str]) -> dict[str, str | int | float]:
    """Return the receipt's fields; one whose number cannot be read is left out."""
    given = {name.lower(): value for name, value in headers.items()}
    texts = {field: given[name] for name, field in FIELDS.items() if name in given}
    found = {field: text if field in NAMES else _read_number(text) for field, text in texts.items()}
    return {field: value for field, value in found.items() if value is not None}


def _read_number(text: str) -> int | float | None:
    """Return the number; None if it is not a finite number."""
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
