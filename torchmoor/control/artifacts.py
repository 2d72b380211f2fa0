"""A model's files and settings: translates CreateModel's container definition for TorchServe.

Files stay where they are, or are downloaded from S3. An archive is served as it is, a checkpoint by the chat handler,
and a prefix in Mode MultiModel by the handler of many models.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from torchmoor.async_inference.objects.object_store import ObjectError
from torchmoor.config.control import ControlSettings
from torchmoor.config.objects import ObjectSettings
from torchmoor.config.routing import MultiModelSettings
from torchmoor.control.downloads import DownloadState, ModelStore, StoredFile
from torchmoor.control.images import Container, default_variables, find_container
from torchmoor.errors import ConfigError, LaunchError, RequestInvalid
from torchmoor.fleet.archives import (
    MANIFEST,
    ArchiveContents,
    archive_name,
    built_in,
    chat_handler,
    model_name,
)
from torchmoor.fleet.model_sources import MANY
from torchmoor.fleet.packed_models import (
    BROKEN,
    FORMS,
    MAX_MANIFEST_BYTES,
    ModelFiles,
    find_unpacked,
    parse_name,
    read_name,
)
from torchmoor.fleet.torchserve_properties import TORCHSERVE_PREFIX, read_properties
from torchmoor.proxy.access.credential_sources import SECRETS
from torchmoor.wire.archives import ARCHIVE_SUFFIX, PACKED_SUFFIXES
from torchmoor.wire.checkpoint_places import CHECKPOINT_VARIABLES, PROPERTIES, PROPERTIES_FOLDER, S3
from torchmoor.wire.handler_variables import MODEL_PATH, MODELS_CACHE, MODELS_SOURCE

FILE = "file://"
MODEL_FOLDER = "/opt/ml/model"  # where a container finds its model
GIVEN = "given"  # the folder of downloaded files


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that a variant's instances run.

    archive: a file or a folder in `store`, or what is written from `contents`. properties: lines of config.properties.
    multi_model: None unless it is many models.
    """

    archive: str
    store: Path | None = None
    contents: ArchiveContents | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    multi_model: MultiModelSettings | None = None

    @property
    def model(self) -> str:
        """Return the model's name in TorchServe."""
        return model_name(self.archive)


class Artifacts:
    """Checks container definitions and fetches what they name.

    model_store: a directory whose files may be named in any case. reserved: variables that the fleet sets.
    """

    def __init__(
        self, settings: ControlSettings, objects: ObjectSettings, model_store: Path, reserved: Collection[str]
    ) -> None:
        self._settings = settings
        self._models = ModelStore(settings, objects)
        self._allowed = [model_store.resolve(), *(Path(each).resolve() for each in settings.model_directories)]
        self._reserved = {*reserved, *SECRETS}

    def check(self, container: Mapping[str, Any]) -> None:
        """Raise RequestInvalid if a container cannot be served here, as far as its definition shows."""
        kind = find_container(container.get("Image", "torchmoor"), self._settings.own_images)
        environment = container.get("Environment", {})
        self._check_environment(environment)
        place = _place_of(container)
        is_many = container.get("Mode") == "MultiModel"
        if not place and (is_many or not _names_checkpoint(environment)):
            raise RequestInvalid(
                "The container names no model: give ModelDataUrl or ModelDataSource, or HF_MODEL_ID in Environment."
            )
        if kind is Container.TRITON and not is_many:
            raise RequestInvalid("A Triton image is served here in Mode MultiModel only: set Mode, and name a prefix.")
        if place.startswith(FILE):
            path = self._find_file(place)
            if is_many and not path.is_dir():
                raise RequestInvalid(f"{path} is not a directory, which a model in Mode MultiModel needs.")
        elif place and not place.startswith(S3):
            raise RequestInvalid(f"{place!r} must be s3://bucket/key, or file:///path below an allowed directory.")

    def _check_environment(self, environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            if name in self._reserved:
                raise RequestInvalid(f"Environment must not set {name}: the proxy and its instances share it.")
            if not _can_be_passed(name) or not _can_be_passed(value):
                raise RequestInvalid(f"Environment: {name!r} has a character that no process can be given.")
        try:
            read_properties(environment)
        except ConfigError as error:
            raise RequestInvalid(f"Environment: {error}.") from error

    def fetch(self, container: Mapping[str, Any], name: str, work: Path, download: DownloadState) -> ServedModel:
        """Return the model for the instances. name: the model's. work: a folder for downloaded and unpacked files.

        Blocks. Raises RequestInvalid, ConfigError, LaunchError or ObjectError.
        """
        self.check(container)
        image = container.get("Image", "torchmoor")
        kind = find_container(image, self._settings.own_images)
        given = {**default_variables(image, kind), **container.get("Environment", {})}
        properties = read_properties(given)
        environment = {key: value for key, value in given.items() if not key.startswith(TORCHSERVE_PREFIX)}
        place = _place_of(container)
        if container.get("Mode") == "MultiModel":
            return self._serve_many(container, place, environment, properties)
        if not place:
            return _serve_chat(name, environment, properties)
        work.mkdir(parents=True, exist_ok=True)
        path = self._fetch_files(place, work, download, environment)
        if path.name.endswith(ARCHIVE_SUFFIX) and path.is_file():
            archive = archive_name(_name_in(path))
            store = _folder_with(work / "store", archive, path)
            return ServedModel(archive=archive, store=store, environment=environment, properties=properties)
        files = find_unpacked(path if path.is_dir() else _folder_with(work / GIVEN, path.name, path), work, "")
        if files.model is not None and (files.model / MANIFEST).is_file():
            archive = read_name(files.model / MANIFEST)
            store = _folder_with(work / "store", archive, files.model)
            return ServedModel(archive=archive, store=store, environment=environment, properties=properties)
        if files == ModelFiles() and not _names_checkpoint(environment):
            raise ConfigError(f"there is no model in {place}: {FORMS}")
        return _serve_chat(name, _with_files(environment, files), properties)

    def _fetch_files(self, place: str, work: Path, download: DownloadState, environment: dict[str, str]) -> Path:
        """Return the file or folder at this place.

        environment: set to name a checkpoint in S3, which the handler downloads once for all instances of this host.
        """
        if not place.startswith(S3):
            return self._find_file(place)
        if place.endswith(PACKED_SUFFIXES):
            file = self._models.find(place)
            folder = self._download([file], work, download)
            return folder / file.name if file.name.endswith(ARCHIVE_SUFFIX) else folder
        stored = self._models.list(place)
        names = {each.name for each in stored}
        if "config.json" in names and MANIFEST not in names:
            environment[MODEL_PATH] = place
            stored = [each for each in stored if each.name == PROPERTIES]
        folder = self._download(stored, work, download)
        if not set(stored) <= set(self._models.list(place)):
            raise ObjectError(f"{place} was replaced while it was downloaded: create the endpoint again")
        return folder

    def _download(self, files: Sequence[StoredFile], work: Path, download: DownloadState) -> Path:
        """Return a folder with these files."""
        folder = work / GIVEN
        folder.mkdir()
        if files:
            self._models.download(files, folder, download)
        return folder

    def _serve_many(
        self, container: Mapping[str, Any], place: str, environment: dict[str, str], properties: Mapping[str, str]
    ) -> ServedModel:
        source = place if place.startswith(S3) else str(self._find_file(place))
        is_cached = container.get("MultiModelConfig", {}).get("ModelCacheSetting", "Enabled") == "Enabled"
        return ServedModel(
            archive=archive_name(MANY),
            contents=built_in(MANY),
            environment={**environment, MODELS_SOURCE: source, MODELS_CACHE: "enabled" if is_cached else "disabled"},
            properties=properties,
            multi_model=MultiModelSettings(is_cached=is_cached),
        )

    def _find_file(self, url: str) -> Path:
        """Return the file or folder that a file URL names. Raises RequestInvalid if that is not allowed."""
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path)).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # such as a null byte, or links in a circle
            raise RequestInvalid(f"{url} names no file.") from error
        if parts.netloc not in ("", "localhost") or not any(path.is_relative_to(each) for each in self._allowed):
            raise RequestInvalid(
                f"{url} may not be read: allowed are {', '.join(map(str, self._allowed))}, and the directories of "
                "torchmoor up --allow-model-dir."
            )
        try:
            is_there = path.exists()
        except OSError as error:
            raise RequestInvalid(f"{url} names no file that can be read: {error.strerror}.") from error
        if not is_there:
            raise RequestInvalid(f"There is no {path}.")
        return path


def _serve_chat(name: str, environment: Mapping[str, str], properties: Mapping[str, str]) -> ServedModel:
    """Serve a checkpoint that the environment or the properties name."""
    return ServedModel(
        archive=archive_name(name), contents=chat_handler(), environment=environment, properties=properties
    )


def _with_files(environment: Mapping[str, str], files: ModelFiles) -> dict[str, str]:
    """Return the environment, with these files in place of a container's model folder."""
    found = dict(environment)
    for variable in CHECKPOINT_VARIABLES:
        if found.get(variable, "").startswith(MODEL_FOLDER):
            del found[variable]
    if files.properties is not None:
        found[PROPERTIES_FOLDER] = str(files.properties)
    if files.model is not None and not _names_checkpoint(found):
        found[MODEL_PATH] = str(files.model)
    return found


def _place_of(container: Mapping[str, Any]) -> str:
    """Return the URL of a container's model; empty if it names none. Raises RequestInvalid."""
    source = container.get("ModelDataSource")
    if source is None:
        return str(container.get("ModelDataUrl", ""))
    if "ModelDataUrl" in container:
        raise RequestInvalid("Give ModelDataUrl or ModelDataSource, not both.")
    return str(source.get("S3DataSource", {}).get("S3Uri", ""))


def _names_checkpoint(environment: Mapping[str, str]) -> bool:
    return any(environment.get(name, "").strip() for name in CHECKPOINT_VARIABLES)


def _can_be_passed(text: str) -> bool:
    """Return whether a process can have this as the name or value of a variable."""
    return "\0" not in text and all(not "\ud800" <= sign <= "\udfff" for sign in text)


def _name_in(archive: Path) -> str:
    """Return the name of an archive's model in TorchServe. Raises LaunchError."""
    try:
        with zipfile.ZipFile(archive) as bundle, bundle.open(MANIFEST) as manifest:
            return parse_name(manifest.read(MAX_MANIFEST_BYTES + 1), f"the manifest of {archive}")
    except KeyError:
        raise LaunchError(
            f"{archive.name} has no handler, because it is a model for an endpoint of many models: use Mode MultiModel"
        ) from None
    except BROKEN as error:
        raise LaunchError(f"{archive.name} cannot be read: {error}") from error


def _folder_with(folder: Path, name: str, path: Path) -> Path:
    """Link a file or folder under this name in a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / name
    link.unlink(missing_ok=True)
    link.symlink_to(path)
    return folder
