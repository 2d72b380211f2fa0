"""Names of this host's endpoints: their form, and that no two are the same."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torchmoor.errors import ConfigError

MAX_NAME = 58  # an instance's name has a hyphen and a number after it
NAME_FORM = f"letters, digits and hyphens between them, {MAX_NAME} at most"
_NAME = re.compile(r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*", re.ASCII)


def is_endpoint_name(name: str) -> bool:
    """Return whether an endpoint of this host may have the name: its instances' names derive from it."""
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def suggest_name(text: str) -> str:
    """Return a name for an endpoint that is like the text."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:MAX_NAME].strip("-") or "model"


def join_names(archives: Iterable[str], checkpoints: Iterable[str]) -> tuple[str, ...]:
    """Return the names of all endpoints: those of archives first. Raises ConfigError if two are the same."""
    names = (*archives, *checkpoints)
    if len({name.lower() for name in names}) != len(names):
        raise ConfigError(f"endpoints must have different names, whatever their case, not {', '.join(names)}")
    return names
