"""Opens the journal that a URL names. Errors show only its scheme, since a URL may contain a password."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from handlers.errors import SettingsError
from handlers.journal.bounded import BoundedJournal
from handlers.journal.directory import DirectoryJournal
from handlers.journal.journal import NO_KEYS, Journal
from handlers.settings.journal import JournalSettings
from torchmoor.wire.store_urls import DIRECTORY_SCHEME, JOURNAL_URLS, REDIS_SCHEMES, S3_SCHEME, read_redis_address

FORMS = f"off, {JOURNAL_URLS}"


def open_journal(settings: JournalSettings, tombstone_s: int, keys: Mapping[str, bytes] = NO_KEYS) -> Journal | None:
    """Open the journal that the settings name, without a connection; None for "off".

    tombstone_s: how long a session is remembered after its expiry. keys: see EventCodec. Raises SettingsError.
    """
    if settings.url == "off":
        return None
    journal = _open(settings, tombstone_s, keys)
    return BoundedJournal(journal, settings.timeout_s, settings.max_in_flight)


def _open(settings: JournalSettings, tombstone_s: int, keys: Mapping[str, bytes]) -> Journal:
    try:
        parts = urlsplit(settings.url)
        _ = parts.port
    except ValueError:  # the error quotes the URL
        raise SettingsError(f"handler.journal.url cannot be read; it must be {FORMS}") from None
    if parts.query or parts.fragment:
        raise SettingsError(f"handler.journal.url must not have a ? or #; in a password write %3F and %23: {FORMS}")
    if parts.scheme == DIRECTORY_SCHEME:
        return _open_directory(parts, settings, keys)
    if parts.scheme in REDIS_SCHEMES:
        return _open_redis(parts, settings, tombstone_s, keys)
    if parts.scheme == S3_SCHEME:
        return _open_s3(parts, settings, keys)
    raise SettingsError(f"handler.journal.url must be {FORMS}")


def _open_directory(parts: SplitResult, settings: JournalSettings, keys: Mapping[str, bytes]) -> Journal:
    if parts.netloc or not parts.path.startswith("/"):
        raise SettingsError("handler.journal.url must name a directory of this machine: file:///a/directory")
    try:
        return DirectoryJournal(Path(unquote(parts.path)), settings, keys)
    except (OSError, ValueError) as exc:
        raise SettingsError(f"handler.journal.url names a directory that cannot be used: {exc}") from exc


def _open_redis(parts: SplitResult, settings: JournalSettings, tombstone_s: int, keys: Mapping[str, bytes]) -> Journal:
    from handlers.journal import redis, redis_connection  # other journals do not need the library

    address = read_redis_address(parts)
    if address is None:
        raise SettingsError(
            f"handler.journal.url must have a host and a database's number: {parts.scheme}://host:port/0"
        )
    connection = redis_connection.RedisConnection(redis_connection.connect(address, settings))
    return redis.RedisJournal(connection, tombstone_s, settings, keys)


def _open_s3(parts: SplitResult, settings: JournalSettings, keys: Mapping[str, bytes]) -> Journal:
    from handlers.journal import s3, s3_objects  # as above
    from handlers.s3 import split_url

    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc:
        raise SettingsError(
            "handler.journal.url must be s3://bucket/prefix; credentials, region and endpoint come from the usual "
            "AWS_... variables or files"
        )
    bucket, prefix = split_url(f"s3://{parts.netloc}{unquote(parts.path)}")
    return s3.S3Journal(s3_objects.connect(settings), bucket, prefix, settings, keys)
