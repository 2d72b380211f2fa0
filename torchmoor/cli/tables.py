"""Plain tables, cut to the terminal's width, or uncut if standard output is not a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence

GAP = "  "
MIN_COLUMN = 8  # a column is not cut below this
NUMBERS = frozenset("0123456789.,-/% ")


def terminal_width() -> int | None:
    """Return the terminal's columns; None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> Iterator[str]:
    """Yield a line for the heads and one for each row. Columns of numbers are right-aligned.

    width: the widest cells are cut until a line fits, and then the line's end. None: nothing is cut.
    """
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    if width is not None:
        while sum(widths) + len(GAP) * (len(widths) - 1) > width and max(widths) > MIN_COLUMN:
            widths[widths.index(max(widths))] -= 1
    is_number = [
        any(row[i] for row in rows) and all(NUMBERS.issuperset(row[i]) for row in rows) for i in range(len(heads))
    ]
    for row in (heads, *rows):
        cells = [
            _cut(cell, size).rjust(size) if right else _cut(cell, size).ljust(size)
            for cell, size, right in zip(row, widths, is_number, strict=True)
        ]
        line = GAP.join(cells).rstrip()
        yield line if width is None else _cut(line, width)


def _cut(cell: str, size: int) -> str:
    return cell if len(cell) <= size else cell[: size - 1] + "…"


def in_bytes(number: float | None) -> str:
    """Format bytes: 1536 is 1.5K; "" for None."""
    if number is None:
        return ""
    for unit in ("", "K", "M", "G"):
        if number < 1000:
            return f"{number:.0f}{unit}" if number >= 10 or not unit else f"{number:.1f}{unit}"
        number /= 1024
    return f"{number:.1f}T"


def in_time(seconds: float) -> str:
    """Format a duration in its one or two largest units."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole < 86400 else f"{whole // 86400} d"
