"""Findings of the checks, and the plan of the fleet that they check."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchmoor.config.listen import ListenSettings

if TYPE_CHECKING:  # the import takes a while
    from torchmoor.config.settings import Configuration


class Level(StrEnum):
    """Severity. A problem keeps something from working."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result. check: its subject. remedy: "" if there is nothing to do."""

    level: Level
    check: str
    found: str
    remedy: str = ""


ok, warning, problem = (partial(Finding, level) for level in Level)


def expect(is_so: bool, check: str, found: str, remedy: str, level: Level = Level.PROBLEM) -> Finding:
    """Return a finding of this level, with its remedy, unless `is_so`."""
    return ok(check, found) if is_so else Finding(level, check, found, remedy)


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: 1 problem, 2 problems."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The fleet that the options describe.

    num_instances: on this machine, of all endpoints; 0: only the proxy runs here. configuration: of a file for
    `torchmoor serve`, None without one. has_built_in: `torchmoor up` builds missing archives of built-in models, such
    as the demo model. is_admin_named: the user gave --admin-url, so a fleet must answer there.
    """

    endpoints: tuple[str, ...]
    num_instances: int
    model_store: Path
    run_dir: Path
    journal: str
    listen: ListenSettings
    url: str
    admin_url: str
    admin_token: str = field(default="", repr=False)
    is_admin_named: bool = False
    has_built_in: bool = False
    configuration: Configuration | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the archives: the file's models, or the endpoints without a file."""
        if self.configuration is None:
            return self.endpoints
        endpoints = self.configuration.proxy.endpoints
        return tuple(dict.fromkeys(variant.model for endpoint in endpoints for variant in endpoint.variants))
