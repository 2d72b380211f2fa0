"""The source that a setting names."""

from pathlib import Path

from handlers.errors import ModelUnknown, SettingsError
from handlers.many.sources.directory import DirectorySource
from handlers.many.sources.given import FILE_URL
from handlers.many.sources.source import SOURCE, Find, SourceModel
from handlers.settings.many import ManySettings


def open_source(settings: ManySettings, worker_dir: Path, setting: str = SOURCE) -> Find:
    """Make the source; makes no request.

    worker_dir: base of a relative directory. setting: the key that names the source, for errors. Raises SettingsError.
    """
    if not settings.source:
        return _find_nothing
    if settings.source.startswith("s3://"):
        from handlers.many.sources.s3 import open_s3  # loads boto3

        return open_s3(settings, setting).find
    if "://" in settings.source.removeprefix(FILE_URL):
        raise SettingsError(f"{setting} must be a directory, file:// or s3://bucket/prefix")
    root = _root(settings, worker_dir)
    if not root.is_dir():
        raise SettingsError(f"{setting}: there is no directory {root}")
    return DirectorySource(root, settings.max_files).find


def identify_source(settings: ManySettings, worker_dir: Path) -> str:
    """Return what tells a source from others: a directory's path, or the URL and the endpoint of its store."""
    if settings.source.startswith("s3://"):
        from handlers.many.sources.s3 import open_s3

        return f"{settings.source} {open_s3(settings).store}".rstrip()
    return str(_root(settings, worker_dir)) if settings.source else ""


def _root(settings: ManySettings, worker_dir: Path) -> Path:
    return (worker_dir / Path(settings.source.removeprefix(FILE_URL)).expanduser()).resolve()


def _find_nothing(name: str) -> SourceModel:
    """Refuse every model, for workers whose models are all loaded by URL."""
    raise ModelUnknown(f"no model {name!r} has been loaded, and handler.many.source is empty; load it by its URL")
