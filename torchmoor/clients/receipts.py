"""What an answer's head tells of it: who answered, why, and what it cost. docs/runtime-api.md has the fields."""

from __future__ import annotations

from collections.abc import Mapping

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


def read_receipt(headers: Mapping[str, str]) -> dict[str, str | int | float]:
    """The fields that are there, by names without hyphens; numbers are numbers."""
    given = {name.lower(): value for name, value in headers.items()}
    return {field: _value(given[name]) for name, field in FIELDS.items() if name in given}


def _value(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
