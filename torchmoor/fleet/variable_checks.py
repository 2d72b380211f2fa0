"""Checks of the handlers' variables, before an instance is started. A worker finds the same errors after some seconds.

Instances with other handlers than the installed ones are not checked: their variables may be others.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchmoor.errors import VariableInvalid
from torchmoor.fleet.archives import archive_name, find_root, has_other_handlers, takes_operations
from torchmoor.fleet.model_sources import MANY
from torchmoor.fleet.torchserve import Launch
from torchmoor.wire.checkpoint_places import CHECKPOINT_VARIABLES, HUB, read_model_id
from torchmoor.wire.handler_variables import ENV_PREFIX, MODEL_PATH

logger = logging.getLogger(__name__)

ENCODING, ENCODING_ERRORS = "utf-8", "backslashreplace"  # a variable's name may have any bytes


def check_variables(launches: Sequence[Launch], model_store: Path, environ: Mapping[str, str]) -> None:
    """Raise VariableInvalid for a variable whose name or value the handlers refuse.

    environ: the environment of all instances.
    """
    checked = [
        launch for launch in _one_per_archive(launches) if _has_our_handlers(launch, launch.store or model_store)
    ]
    for launch in checked:
        if launch.archive != archive_name(MANY):
            _check_checkpoint({**environ, **launch.environment})
    if checked and any(name.startswith(ENV_PREFIX) for name in environ):
        _check_settings(environ)


def _one_per_archive(launches: Sequence[Launch]) -> list[Launch]:
    return list({(launch.store, launch.archive): launch for launch in launches}.values())


def _has_our_handlers(launch: Launch, store: Path) -> bool:
    archive = store / launch.archive
    return launch.contents is not None or (takes_operations(archive) and not has_other_handlers(archive))


def _check_checkpoint(environ: Mapping[str, str]) -> None:
    """Raise VariableInvalid unless the variable that names the checkpoint has the form of a place."""
    name = next((each for each in CHECKPOINT_VARIABLES if environ.get(each, "").strip()), MODEL_PATH)
    text = environ.get(name, "").strip()
    if name == MODEL_PATH and not text.startswith(HUB):  # a path, also a relative one
        return
    try:
        read_model_id(text)
    except ValueError as error:
        raise VariableInvalid(f"{name} is invalid: {error}") from error  # without the value: a URL may have a password


def _check_settings(environ: Mapping[str, str]) -> None:
    """Let the handlers check their settings, in a process of its own: nothing here imports them."""
    ended = subprocess.run(
        [sys.executable, "-m", "handlers.settings.check"],
        cwd=find_root(),
        env={**environ, "PYTHONIOENCODING": f"{ENCODING}:{ENCODING_ERRORS}"},
        capture_output=True,
        encoding=ENCODING,
        errors=ENCODING_ERRORS,
        check=False,
    )
    if ended.returncode == 0:
        return
    if ended.stdout:
        raise VariableInvalid(ended.stdout.strip())
    logger.warning("the handlers' settings could not be checked error=%s", ended.stderr.strip()[-1000:])
