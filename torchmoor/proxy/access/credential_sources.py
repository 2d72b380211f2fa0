"""Secrets from the environment, or from a file that only its owner and group can read; never from arguments.

TORCHMOOR_ACCESS_KEYS    ID:SECRET[:SESSION_TOKEN], more after commas
TORCHMOOR_TOKENS         NAME:TOKEN, more after commas
TORCHMOOR_ADMIN_TOKEN    TOKEN

The file has one secret per line, with `#` for comments: `key ID SECRET [SESSION_TOKEN]`, `token NAME TOKEN`,
`admin TOKEN`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.errors import ConfigError

ACCESS_KEYS = "TORCHMOOR_ACCESS_KEYS"
TOKENS = "TORCHMOOR_TOKENS"
ADMIN_TOKEN = "TORCHMOOR_ADMIN_TOKEN"
KEYS_FILE = "TORCHMOOR_KEYS_FILE"
CLIENT_TOKEN = "TORCHMOOR_TOKEN"  # what torchmoor's own commands send to a proxy
ASYNC_QUEUE = "TORCHMOOR_ASYNC_QUEUE"  # a URL with a password in it; torchmoor serve's async_inference.queue
SECRETS = frozenset((ACCESS_KEYS, TOKENS, ADMIN_TOKEN, KEYS_FILE, CLIENT_TOKEN, ASYNC_QUEUE))
MAX_FILE_BYTES = 1 << 20

_FORMS = "one of `key ID SECRET [SESSION_TOKEN]`, `token NAME TOKEN`, or `admin TOKEN` (once)"


def read_credentials(environ: Mapping[str, str], path: Path | None) -> Credentials:
    """Return the credentials of the environment and of the file, if any. Raises ConfigError, which shows no secret."""
    lines: list[tuple[str, list[str]]] = [
        *((ACCESS_KEYS, ["key", *item.split(":")]) for item in _items(environ.get(ACCESS_KEYS, ""))),
        *((TOKENS, ["token", *item.split(":", 1)]) for item in _items(environ.get(TOKENS, ""))),
    ]
    if environ.get(ADMIN_TOKEN):
        lines.append((ADMIN_TOKEN, ["admin", environ[ADMIN_TOKEN]]))
    if path is not None:
        lines += _read_lines(path)
    keys: dict[str, AccessKey] = {}
    tokens: dict[str, str] = {}
    admin_token = ""
    for where, words in lines:
        match words:
            case ["key", key_id, secret, *rest] if len(rest) <= 1:
                _check_new(key_id, keys, where)
                keys[key_id] = AccessKey(secret=secret, session_token=rest[0] if rest else "")
            case ["token", name, token]:
                _check_new(name, tokens, where)
                tokens[name] = token
            case ["admin", token] if not admin_token:
                admin_token = token
            case _:
                raise ConfigError(f"{where}: expected {_FORMS}")
    return Credentials(keys=keys, tokens=tokens, admin_token=admin_token)


def read_secret_file(path: Path) -> str:
    """Return a file's text. Raises ConfigError if it cannot be read, or if other users can read or change it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(f"{path} can be read or changed by others than its owner: chmod 600 {path}")
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("ascii")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be ASCII text") from error


def _read_lines(path: Path) -> list[tuple[str, list[str]]]:
    lines = [line.split() for line in read_secret_file(path).splitlines()]
    return [
        (f"{path}, line {number}", words)
        for number, words in enumerate(lines, 1)
        if words and not words[0].startswith("#")
    ]


def _items(text: str) -> list[str]:
    return [item for item in (part.strip() for part in text.split(",")) if item]


def _check_new(name: str, known: Mapping[str, object], where: str) -> None:
    if name in known:
        raise ConfigError(f"{where}: {name!r} is given twice")
