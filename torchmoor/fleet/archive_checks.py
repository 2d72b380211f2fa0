"""Checks of the archives that instances will serve, before one is started."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from torchmoor.errors import LaunchError
from torchmoor.fleet.archives import find_fault, has_handler, has_other_handlers
from torchmoor.fleet.torchserve import Launch

logger = logging.getLogger(__name__)

MAX_SHOWN = 10  # names of other archives in an error


def check_archives(model_store: Path, launches: Sequence[Launch]) -> None:
    """Raise LaunchError for an archive that cannot be served; warn once of one with other handlers."""
    checked: set[Path] = set()
    for launch in launches:
        store = launch.store or model_store
        archive = store / launch.archive
        if launch.contents is not None or archive in checked:
            continue
        if not archive.exists():
            others = ", ".join(sorted(path.name for path in store.glob("*.mar"))[:MAX_SHOWN])
            raise LaunchError(
                f"there is no {launch.archive} in {store}{others and f', but {others}'}: serve a checkpoint with "
                f"torchmoor up FOLDER --name {launch.model}, give the archives' directory with --model-store, or build "
                "it with make archives in a checkout"
            )
        if not has_handler(archive):
            raise LaunchError(
                f"{archive} has no handler, because it is a model for an endpoint of many models: serve it with "
                f"torchmoor up --endpoint many --models {archive.parent}"
            )
        if fault := find_fault(archive):
            raise LaunchError(f"{archive}: {fault}")
        if has_other_handlers(archive):
            logger.warning("%s has other handlers than this torchmoor; build it again, unless you want those", archive)
        checked.add(archive)
