"""The source that the setting handler.many.source names."""

from pathlib import Path

from handlers.errors import SettingsError
from handlers.many.sources.directory import DirectorySource
from handlers.many.sources.given import NoSource
from handlers.many.sources.source import ModelSource
from handlers.settings import ManySettings


def open_source(settings: ManySettings, archive: Path) -> ModelSource:
    """Make the source; makes no request. archive: base of a relative directory. Raises SettingsError."""
    if not settings.source:
        return NoSource()
    if settings.source.startswith("s3://"):
        from handlers.many.sources.s3 import open_s3  # loads boto3

        return open_s3(settings)
    if "://" in settings.source:
        raise SettingsError("handler.many.source must be a directory or s3://bucket/prefix")
    root = (archive / Path(settings.source).expanduser()).resolve()
    if not root.is_dir():
        raise SettingsError(f"handler.many.source: there is no directory {root}")
    return DirectorySource(root, settings.max_files)
