"""Receipts in an answer's head, from any handler."""

import json

import pytest

from torchmoor.wire.receipt import NUMBER_FIELDS, read_receipt


def test_numbers_are_numbers_and_names_are_names() -> None:
    """Numbers become numbers and names stay texts, even a variant called 1 or an instance called inf."""
    told = {
        "X-Torchmoor-Instance": "inf",
        "x-amzn-Invoked-Production-Variant": "1",
        "X-Torchmoor-Context-Tokens": "59",
        "X-Torchmoor-Queue-Ms": "3.5",
        "Content-Type": "application/json",
    }

    assert read_receipt(told) == {"instance": "inf", "variant": "1", "context_tokens": 59, "queue_ms": 3.5}


def test_every_number_that_wire_lists_is_a_field() -> None:
    """Every number in wire's table is a field, so that clients need no change for a new one."""
    found = read_receipt(dict.fromkeys(NUMBER_FIELDS, "1"))

    assert len(NUMBER_FIELDS) == len(found) == 8
    assert found["rebuilt_events"] == found["ttft_ms"] == 1


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "many", "", "9" * 5000, "1e999"])
def test_a_number_that_is_none_is_left_out(text: str) -> None:
    """An invalid number is left out, so that printed numbers are valid JSON and can be summed."""
    found = read_receipt({"X-Torchmoor-Generated-Tokens": text, "X-Torchmoor-Cache-Tier": "kv"})

    assert json.loads(json.dumps(found, allow_nan=False)) == {"cache_tier": "kv"}
