"""Findings of the checks, and the plan of the fleet that they check."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Level(Enum):
    """Severity. A problem keeps something from working."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result. check: its subject. remedy: "" if there is nothing to do."""

    check: str
    level: Level
    found: str
    remedy: str = ""

    def describe(self) -> dict[str, str]:
        return {"check": self.check, "level": self.level.value, "found": self.found, "remedy": self.remedy}


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Level.WARNING, found, remedy)


def problem(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Level.PROBLEM, found, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The fleet that the options describe.

    num_instances: on this machine, of all endpoints; 0: only the proxy runs here. configuration: of a file for
    `torchmoor serve`, None without one. is_admin_named: the user gave --admin-url, so a fleet must answer there.
    """

    endpoints: tuple[str, ...]
    num_instances: int
    model_store: Path
    run_dir: Path | None
    journal: str
    host: str
    port: int
    admin_host: str
    admin_port: int
    url: str
    admin_url: str
    admin_token: str = field(default="", repr=False)
    is_admin_named: bool = False
    configuration: Any = None  # torchmoor.config.file.Configuration, whose import takes a while
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
