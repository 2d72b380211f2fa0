"""Reads the receipt of an answer (torchmoor/wire/receipt.py)."""

from __future__ import annotations

from collections.abc import Mapping

from torchmoor.wire.receipt import NUMBER_FIELDS, TEXT_FIELDS, read_number


def read_receipt(headers: Mapping[str, str]) -> dict[str, str | int | float]:
    """Return the receipt in an answer's header fields; a number that cannot be read is left out."""
    given = {name.lower(): value for name, value in headers.items()}
    texts = {field: given[name] for name, field in TEXT_FIELDS.items() if name in given}
    numbers = {field: read_number(given[name]) for name, field in NUMBER_FIELDS.items() if name in given}
    return {**texts, **{field: number for field, number in numbers.items() if number is not None}}
