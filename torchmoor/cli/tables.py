"""Plain tables, cut to the terminal's width, or uncut if standard output is not a terminal."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Iterator, Sequence

from torchmoor.cli.foreign_text import plain

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
    rows = [[*map(plain, row)] for row in rows]
    widths = [max(map(_columns, column)) for column in zip(heads, *rows, strict=True)]
    if width is not None:
        while sum(widths) + len(GAP) * (len(widths) - 1) > width and max(widths) > MIN_COLUMN:
            widths[widths.index(max(widths))] -= 1
    is_number = [
        any(row[i] for row in rows) and all(NUMBERS.issuperset(row[i]) for row in rows) for i in range(len(heads))
    ]
    for row in (heads, *rows):
        cells = [
            _pad(_cut(cell, size), size, is_right=right)
            for cell, size, right in zip(row, widths, is_number, strict=True)
        ]
        line = GAP.join(cells).rstrip()
        yield line if width is None else _cut(line, width)


def _columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_sign_columns, text))


def _sign_columns(sign: str) -> int:
    if unicodedata.category(sign) in ("Mn", "Me"):  # drawn over the sign before
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1


def _pad(cell: str, size: int, *, is_right: bool) -> str:
    gap = " " * (size - _columns(cell))
    return gap + cell if is_right else cell + gap


def _cut(cell: str, size: int) -> str:
    if _columns(cell) <= size:
        return cell
    end = len(cell)
    while _columns(cell[:end]) >= size:
        end -= 1
    return cell[:end] + "…"


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
