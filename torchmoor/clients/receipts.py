"""What an answer's head tells of it: who answered, why, and what it cost. docs/runtime-api.md has the fields."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

FIELDS = {
    "x-torchmoor-instance": "instance",
    "x-amzn-invoked-production-variant": "variant",
    "x-amzn-sagemaker-invoked-routing-reason": "routing_reason",
    "x-amzn-requestid": "request_id",
    "x-torchmoor-cache-tier": "cache_tier",
    "x-torchmoor-context-tokens": "context_tokens",
    "x-torchmoor-prefill-tokens": "prefill_tokens",
    "x-torchmoor-generated-tokens": "generated_tokens",
    "x-torchmoor-queue-ms": "queue_ms",
    "x-torchmoor-ttft-ms": "ttft_ms",
    "x-torchmoor-rebuilt-events": "rebuilt_events",
    "x-torchmoor-dropped-turns": "dropped_turns",
}
NAMES = frozenset(("instance", "variant", "routing_reason", "request_id", "cache_tier"))  # a variant may be called 1
MAX_DIGITS = 18


def read_receipt(headers: Mapping[str, str]) -> dict[str, str | int | float]:
    """The fields that are there, by names without hyphens; a number that is none is left out."""
    given = {name.lower(): value for name, value in headers.items()}
    texts = {field: given[name] for name, field in FIELDS.items() if name in given}
    found = {field: text if field in NAMES else _read_number(text) for field, text in texts.items()}
    return {field: value for field, value in found.items() if value is not None}


def _read_number(text: str) -> int | float | None:
    """None if it is none, or one that JSON does not have."""
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
