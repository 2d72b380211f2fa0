"""The source that a setting names."""

from pathlib import Path

from handlers.errors import ModelUnknown, SettingsError
from handlers.many.sources.directory import DirectorySource
from handlers.many.sources.given import FILE_URL
from handlers.many.sources.source import SOURCE, OpenedSource, SourceModel
from handlers.settings.many import ManySettings


def open_source(settings: ManySettings, worker_dir: Path, setting: str = SOURCE) -> OpenedSource:
    """Make the source; makes no request.

    worker_dir: base of a relative directory. setting: the key that names the source, for errors. Raises SettingsError.
    """
    if not settings.source:
        return OpenedSource(_find_nothing, "")
    if settings.source.startswith("s3://"):
        from handlers.many.sources.s3 import open_s3  # loads boto3

        source = open_s3(settings, setting)
        return OpenedSource(source.find, f"{settings.source} {source.store}".rstrip())
    path = settings.source.removeprefix(FILE_URL)
    if "://" in path:
        raise SettingsError(f"{setting} must be a directory, file:// or s3://bucket/prefix")
    root = (worker_dir / Path(path).expanduser()).resolve()
    if not root.is_dir():
        raise SettingsError(f"{setting}: there is no directory {root}")
    return OpenedSource(DirectorySource(root, settings.max_files).find, str(root))


def _find_nothing(name: str) -> SourceModel:
    """Refuse every model, for workers whose models are all loaded by URL."""
    raise ModelUnknown(f"no model {name!r} has been loaded, and handler.many.source is empty; load it by its URL")
