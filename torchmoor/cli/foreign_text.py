"""Text of models, servers and clients, without the control characters that a terminal would obey."""

from __future__ import annotations

_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})


def plain(text: str) -> str:
    """Return a text as one line without control characters."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def without_controls(text: str) -> str:
    """Return a text without control characters, except line breaks and tabs."""
    return text.translate(_CONTROLS)
