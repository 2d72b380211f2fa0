"""What the proxy reads of a handler's status: its sessions, its models, and whether it reads pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torchmoor.proxy.routing.model_placement import ModelReport, ReportedTier

_TIERS = {tier.name.lower(): tier for tier in ReportedTier}


class ReportedStatus(NamedTuple):
    """A handler's status. Each field is None if it is not reported.

    session_room: sessions that the handler can still take. models: those of a handler with many models. can_see:
    whether a handler of one model reads pictures.
    """

    open_sessions: int | None = None
    session_room: int | None = None
    models: ModelReport | None = None
    can_see: bool | None = None


def parse_status(content: Mapping[str, object]) -> ReportedStatus:
    """Read a status; an answer of another form reports nothing."""
    sessions = content.get("sessions")
    most, number = (sessions.get("max"), sessions.get("open")) if isinstance(sessions, dict) else (None, None)
    capabilities = content.get("capabilities")
    can_see = capabilities.get("can_see") if isinstance(capabilities, dict) else None
    if not isinstance(can_see, bool):
        can_see = None
    if not isinstance(number, int):
        return ReportedStatus(models=_parse_models(content), can_see=can_see)
    room = max(0, most - number) if isinstance(most, int) else None
    return ReportedStatus(number, room, _parse_models(content), can_see)


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
