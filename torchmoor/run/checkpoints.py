"""The checkpoints that `torchmoor up` serves: each has a name and a place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmoor.config.up import UpSettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.archives import model_name
from torchmoor.fleet.model_sources import MANY
from torchmoor.run.endpoint_names import NAME_FORM, is_endpoint_name, suggest_name
from torchmoor.wire.archives import ARCHIVE_SUFFIX
from torchmoor.wire.checkpoint_places import (
    CHECKPOINT_VARIABLES,
    HUB,
    HUB_FORM,
    HUB_NAME,
    S3,
    split_hub_place,
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint and the endpoint that serves it.

    place: an absolute directory, s3://bucket/prefix or hf://owner/name.
    """

    name: str
    place: str


def find_checkpoints(settings: UpSettings) -> list[Checkpoint]:
    """Return the checkpoints of the command line in its order. Raises ConfigError, which says what to do."""
    places, names = settings.checkpoints, settings.names
    if names and not places:
        raise ConfigError("--name is the name of a MODEL: give its directory, s3://bucket/prefix or hf://owner/name")
    if names and len(names) != len(places):
        raise ConfigError(
            f"MODEL and --name differ in number ({len(places)} and {len(names)}): give each MODEL its --name, or none "
            "of them"
        )
    found = [
        Checkpoint(name, _check_place(place))
        for place, name in zip(places, names or map(_name_of, places), strict=True)
    ]
    for name in (checkpoint.name for checkpoint in found):
        if not is_endpoint_name(name):
            raise ConfigError(f"--name must be {NAME_FORM}, not {name!r}: {suggest_name(name)} is possible")
        if name == MANY:
            raise ConfigError(f"--name must not be {MANY}, the endpoint of --models")
    return found


def check_environment(settings: UpSettings, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a variable names a checkpoint, but not the endpoint that would serve it."""
    named = [name for name in CHECKPOINT_VARIABLES if environ.get(name, "").strip()]
    archives = [name for name in settings.endpoints if name != MANY]
    if not named or not archives:
        return
    advice = "give each model as an argument, torchmoor up MODEL --name NAME"
    if len(archives) > 1:
        raise ConfigError(f"{named[0]} is set, and would be the model of {' and '.join(archives)}: {advice}")
    if "endpoints" not in settings.model_fields_set:
        raise ConfigError(
            f"{named[0]} is set, and no option names the endpoint that serves it: {advice}, or name the endpoint with "
            "--endpoint"
        )


def _name_of(place: str) -> str:
    """Return the name of a checkpoint that the user gave none: the last part of its place."""
    if place.startswith(HUB):
        place = place.partition("@")[0]
    if place.startswith((S3, HUB)):
        return suggest_name(place.rstrip("/").rpartition("/")[2])
    return suggest_name(Path(place).resolve().name)


def _check_place(place: str) -> str:
    """Return an absolute directory, or a URL as it is. Raises ConfigError."""
    if "://" in place or place.startswith(("s3:", "hf:")):
        _check_url(place)
        return place
    return str(_find_folder(place))


def _check_url(place: str) -> None:
    if place.startswith(HUB):
        try:
            split_hub_place(place)
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
    elif place.startswith(S3):
        bucket, _, prefix = place.removeprefix(S3).partition("/")
        if not bucket or not prefix.strip("/"):
            raise ConfigError(f"{place} must be {S3}bucket/prefix")
    else:
        raise ConfigError(f"{place} must be a directory, {S3}bucket/prefix or {HUB_FORM}")


def _find_folder(place: str) -> Path:
    """Return the absolute directory of a checkpoint. Raises ConfigError."""
    folder = Path(place).resolve()
    if folder.is_file() and folder.suffix == ARCHIVE_SUFFIX:
        raise ConfigError(
            f"{place} is an archive: serve it with --model-store {folder.parent} --endpoint {model_name(folder.name)}"
        )
    if folder.is_file():
        raise ConfigError(f"{place} is a file: give the directory that save_pretrained wrote, with config.json in it")
    if not folder.is_dir():
        hint = f"; a model of the Hugging Face hub is {HUB}{place}" if HUB_NAME.fullmatch(place) else ""
        raise ConfigError(f"there is no directory {folder}{hint}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"there is no config.json in {folder}: give the directory that save_pretrained wrote")
    return folder
