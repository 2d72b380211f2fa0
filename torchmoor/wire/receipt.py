"""An answer's receipt: the response headers that name its instance, its routing and its cost (docs/runtime-api.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite

from torchmoor.wire import headers

# What an answer cost, from a handler
CACHE_TIER = "x-torchmoor-cache-tier"
CONTEXT_TOKENS = "x-torchmoor-context-tokens"
PREFILL_TOKENS = "x-torchmoor-prefill-tokens"
GENERATED_TOKENS = "x-torchmoor-generated-tokens"
QUEUE_MS = "x-torchmoor-queue-ms"
TTFT_MS = "x-torchmoor-ttft-ms"
REBUILT_EVENTS = "x-torchmoor-rebuilt-events"
DROPPED_TURNS = "x-torchmoor-dropped-turns"
TURN = "x-torchmoor-turn"


@dataclass(frozen=True, slots=True)
class ReceiptField:
    """A field that clients, logs and traces show. label: its name on the pages, which show numbers with one."""

    header: str
    name: str
    is_number: bool = False
    label: str = ""


RECEIPT_FIELDS = (
    ReceiptField(headers.INSTANCE, "instance"),
    ReceiptField(headers.INVOKED_VARIANT, "variant"),  # may be named 1
    ReceiptField(headers.INVOKED_ROUTING_REASON, "routing_reason"),
    ReceiptField("x-amzn-requestid", "request_id"),
    ReceiptField(CACHE_TIER, "cache_tier"),
    ReceiptField(CONTEXT_TOKENS, "context_tokens", True, "Prompt, with the conversation"),
    ReceiptField(PREFILL_TOKENS, "prefill_tokens", True, "Computed for this answer"),
    ReceiptField(GENERATED_TOKENS, "generated_tokens", True, "Generated"),
    ReceiptField(QUEUE_MS, "queue_ms", True),
    ReceiptField(TTFT_MS, "ttft_ms", True),
    ReceiptField(REBUILT_EVENTS, "rebuilt_events", True, "Events read from the journal"),
    ReceiptField(DROPPED_TURNS, "dropped_turns", True, "Turns left out to fit the context"),
    ReceiptField(TURN, "turn", True),
)
TEXT_FIELDS = {each.header: each.name for each in RECEIPT_FIELDS if not each.is_number}
NUMBER_FIELDS = {each.header: each.name for each in RECEIPT_FIELDS if each.is_number}
MAX_DIGITS = 18


def read_receipt(headers: Mapping[str, str]) -> dict[str, str | int | float]:
    """Return the receipt in an answer's header fields; a number that cannot be read is left out."""
    given = {name.lower(): value for name, value in headers.items()}
    texts = {field: given[name] for name, field in TEXT_FIELDS.items() if name in given}
    numbers = {field: read_number(given[name]) for name, field in NUMBER_FIELDS.items() if name in given}
    return {**texts, **{field: number for field, number in numbers.items() if number is not None}}


def read_number(text: str) -> int | float | None:
    """Return the number; None if it is not a finite number."""
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None


def make_script() -> str:
    """Return the module receipt.js of the chat page and the dashboard: the table above as FIELDS."""
    return f"export const FIELDS = {json.dumps([asdict(each) for each in RECEIPT_FIELDS])};\n"
