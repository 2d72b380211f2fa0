"""Numbers of an answer's receipt, as header fields carry them."""

from __future__ import annotations

from math import isfinite

from torchmoor.wire import headers

NUMBER_FIELDS = {
    name: name.removeprefix(headers.TORCHMOOR_PREFIX).replace("-", "_") for name in headers.RECEIPT_NUMBERS
}
MAX_DIGITS = 18


def read_number(text: str) -> int | float | None:
    """Return the number; None if it is not a finite number."""
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
