"""The search for the container's model, which becomes a model store for TorchServe.

A model is an archive (.mar), an unpacked archive, a Hugging Face checkpoint's directory, or a tar.gz of one of them.
Weights are never copied: an archive is unpacked once for all instances, and a directory is linked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchmoor.container.environment import ContainerEnvironment
from torchmoor.errors import ConfigError
from torchmoor.fleet.archives import MANIFEST, archive_name
from torchmoor.fleet.model_sources import MANY
from torchmoor.fleet.packed_models import FORMS, ModelFiles, find_unpacked, read_name
from torchmoor.wire.checkpoint_places import CHECKPOINT_VARIABLES, PROPERTIES_FOLDER
from torchmoor.wire.handler_variables import MODEL_PATH

CHAT = "chat"  # the archive with the chat handler and no checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """One archive of a model store. name: the name in TorchServe. environment: further variables of its handler."""

    name: str
    archive: str
    store: Path
    environment: Mapping[str, str] = field(default_factory=dict)


def find_model(variables: ContainerEnvironment, work: Path, environ: Mapping[str, str]) -> FoundModel:
    """Return the container's model, in a store below `work`. Raises ConfigError, which says what to do."""
    store = work / "store"
    store.mkdir(parents=True)
    if variables.is_multi_model:
        return _bundled(variables, store, MANY)
    folder = variables.model_dir
    files = find_unpacked(folder, work, variables.model) if folder.is_dir() else ModelFiles()
    found = files.model
    if found is None and variables.model:
        return _bundled(variables, store, variables.model)
    names_checkpoint = any(environ.get(name, "").strip() for name in CHECKPOINT_VARIABLES)
    if found is None and files.properties is None and not names_checkpoint:
        raise ConfigError(f"there is no model in {folder}: {FORMS}")
    if found is not None and (found / MANIFEST).is_file():
        name = read_name(found / MANIFEST)
        (store / name).symlink_to(found.resolve())
        return FoundModel(name=name, archive=name, store=store)
    environment = {}
    if files.properties not in (None, folder):
        environment[PROPERTIES_FOLDER] = str(files.properties)
    if found is not None and not names_checkpoint:
        environment[MODEL_PATH] = str(found.resolve())
    return replace(_bundled(variables, store, CHAT), environment=environment)


def _bundled(variables: ContainerEnvironment, store: Path, name: str) -> FoundModel:
    """Return one of the image's own archives."""
    archive = variables.archives / archive_name(name)
    if not archive.is_file():
        there = sorted(path.stem for path in variables.archives.glob("*.mar"))
        raise ConfigError(
            f"this image has no archive {name!r}, but {', '.join(there) or 'none'}: put the model into "
            f"{variables.model_dir}, or build the image with it (docs/container.md)"
        )
    (store / archive.name).symlink_to(archive.resolve())
    return FoundModel(name=name, archive=archive.name, store=store)
