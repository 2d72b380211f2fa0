"""The parts of a handler's status that the proxy reads: its sessions, its models, and whether it reads images."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, TypeVar


class ReportedTier(IntEnum):
    """Where an instance has a model; a lower value is better."""

    DEVICE = 0
    HOST = 1
    LOADING = 2
    DISK = 3
    BROKEN = 4  # the instance could not load it


class ModelReport(NamedTuple):
    """An instance's models. used_bytes, max_bytes: its device's budget; 0 if it does not report them."""

    models: Mapping[str, ReportedTier]
    used_bytes: int = 0
    max_bytes: int = 0


T = TypeVar("T")

_TIERS = {tier.name.lower(): tier for tier in ReportedTier}


class ReportedStatus(NamedTuple):
    """A handler's status. Each field is None if it is not reported.

    session_room: sessions that the handler can still take. models: those of a handler with many models. can_see:
    whether a handler of one model reads images. max_images: per session. instance: the handler's own name, which its
    session ids contain.
    """

    open_sessions: int | None = None
    session_room: int | None = None
    models: ModelReport | None = None
    can_see: bool | None = None
    max_images: int | None = None
    instance: str | None = None


def parse_status(content: Mapping[str, object]) -> ReportedStatus:
    """Read a status; of an answer in another form, every field is None."""
    number, most = _find(content, "sessions", "open", int), _find(content, "sessions", "max", int)
    instance = content.get("instance")
    return ReportedStatus(
        open_sessions=number,
        session_room=None if number is None or most is None else max(0, most - number),
        models=_parse_models(content),
        can_see=_find(content, "capabilities", "can_see", bool),
        max_images=_find(content, "capabilities", "max_images", int),
        instance=instance if isinstance(instance, str) else None,
    )


def _find(content: Mapping[str, object], group: str, name: str, kind: type[T]) -> T | None:
    """Return a value of this type; None if there is none."""
    values = content.get(group)
    value = values.get(name) if isinstance(values, dict) else None
    return value if isinstance(value, kind) else None


def _parse_models(content: Mapping[str, object]) -> ModelReport | None:
    """Return each model's best tier, without unknown tiers and replaced models."""
    rows = content.get("models")
    if not isinstance(rows, list):
        return None
    models: dict[str, ReportedTier] = {}
    for row in rows:
        if isinstance(row, dict):
            name, tier = row.get("name"), _TIERS.get(str(row.get("tier")))
            if isinstance(name, str) and tier is not None and not row.get("retired"):
                models[name] = min(tier, models.get(name, tier))
    budgets = content.get("budgets")
    device = budgets.get("device") if isinstance(budgets, dict) else None
    used, most = (device.get("used"), device.get("max")) if isinstance(device, dict) else (None, None)
    if not isinstance(used, int) or not isinstance(most, int):
        used = most = 0
    return ModelReport(models, used, most)
