"""What a journal's URL names. A URL may have a password in it: no error here shows any of it but its scheme."""

from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from handlers.errors import ConfigError
from handlers.journal.bounded import BoundedJournal
from handlers.journal.directory import DirectoryJournal
from handlers.journal.journal import Journal
from handlers.settings import JournalSettings

FORMS = "off, file:///a/directory, redis://user:password@host:port/db, rediss://..., valkey://... or s3://bucket/prefix"
_REDIS = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}  # the scheme: whether by TLS
REDIS_PORT = 6379


def open_journal(settings: JournalSettings, tombstone_s: int) -> Journal | None:
    """The journal that a setting names, None for "off"; makes no connection yet.

    tombstone_s: how long after its expiry a session is remembered. Raises ConfigError.
    """
    if settings.url == "off":
        return None
    journal = _open(settings, tombstone_s)
    return BoundedJournal(journal, settings.timeout_s, settings.max_in_flight)


def _open(settings: JournalSettings, tombstone_s: int) -> Journal:
    try:
        parts = urlsplit(settings.url)
        port = parts.port
    except ValueError:  # its text has a part of the URL
        raise ConfigError(f"handler.journal.url cannot be read; it must be {FORMS}") from None
    if parts.query or parts.fragment:
        raise ConfigError(f"handler.journal.url must not have a ? or #; in a password write %3F and %23: {FORMS}")
    if parts.scheme == "file":
        return _open_directory(parts, settings)
    if parts.scheme in _REDIS:
        return _open_redis(parts, port or REDIS_PORT, settings, tombstone_s)
    if parts.scheme == "s3":
        return _open_s3(parts, settings)
    raise ConfigError(f"handler.journal.url must be {FORMS}")


def _open_directory(parts: SplitResult, settings: JournalSettings) -> Journal:
    if parts.netloc or not parts.path.startswith("/"):
        raise ConfigError("handler.journal.url must name a directory of this machine: file:///a/directory")
    try:
        return DirectoryJournal(Path(unquote(parts.path)), settings.claim_s)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"handler.journal.url names a directory that cannot be used: {exc}") from exc


def _open_redis(parts: SplitResult, port: int, settings: JournalSettings, tombstone_s: int) -> Journal:
    from handlers.journal import redis  # a worker without such a journal does without its library

    db = parts.path.removeprefix("/") or "0"
    if not parts.hostname or not db.isascii() or not db.isdigit():
        raise ConfigError(f"handler.journal.url must have a host and a database's number: {parts.scheme}://host:port/0")
    client = redis.connect(
        host=parts.hostname,
        port=port,
        db=int(db),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=_REDIS[parts.scheme],
        limits=settings,
    )
    return redis.RedisJournal(client, tombstone_s, settings.claim_s)


def _open_s3(parts: SplitResult, settings: JournalSettings) -> Journal:
    from handlers.journal import s3  # as above

    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc:
        raise ConfigError(
            "handler.journal.url must be s3://bucket/prefix; credentials, region and endpoint come from the usual "
            "AWS_... variables or files"
        )
    prefix = unquote(parts.path).strip("/")
    try:
        client = s3.connect(settings)
    except OSError as exc:
        raise ConfigError(f"handler.journal.url names S3, which cannot be used: {exc}") from exc
    return s3.S3Journal(client, parts.netloc, f"{prefix}/" if prefix else "", settings.claim_s)
