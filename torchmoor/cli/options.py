"""Options that several commands share: addresses of the planes, credentials, output."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from torchmoor.cli.foreign_text import without_controls
from torchmoor.cli.running_fleets import complete_endpoints
from torchmoor.clients.admin import AdminClient
from torchmoor.config.credentials import Credentials
from torchmoor.config.launcher import DEFAULT_ENDPOINT
from torchmoor.config.listen import ListenSettings
from torchmoor.errors import ConfigError
from torchmoor.proxy.access.credential_sources import ADMIN_TOKEN, CLIENT_TOKEN, KEYS_FILE, read_credentials

F = TypeVar("F", bound=Callable[..., Any])

RUNTIME_URL = "TORCHMOOR_URL"
ADMIN_URL = "TORCHMOOR_ADMIN_URL"
LISTEN = ListenSettings()  # where a fleet listens by default


class Number(click.FloatRange):
    """A finite number in a range. It refuses nan, which no comparison excludes, and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class HeaderText(click.ParamType):  # type: ignore[type-arg]  # as for Address
    """A text that becomes a header of a request."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not (value.isascii() and value.isprintable()):
            self.fail(f"{value!r} has a character that is not printable ASCII.", param, ctx)
        return str(value)


class Address(click.ParamType):  # type: ignore[type-arg]  # not generic in the oldest click that the wheel accepts
    """The URL of a plane."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parts = urlsplit(value)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            self.fail(f"it must begin with http:// or https:// and name a host, not {value!r}.", param, ctx)
        return str(value)


def _keys_option(text: str) -> Callable[[F], F]:
    return click.option(
        "--keys",
        "keys_file",
        metavar="FILE",
        envvar=KEYS_FILE,
        show_envvar=True,
        type=click.Path(path_type=Path, dir_okay=False),
        help=text,
    )


log_level_option = click.option(
    "--log-level",
    default="warning",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Print log messages of this level and above.",
)

no_auth_option = click.option(
    "--no-auth", is_flag=True, help="Allow an address other than loopback without credentials."
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")

url_option = click.option(
    "--url",
    "--endpoint-url",
    "url",
    type=Address(),
    envvar=RUNTIME_URL,
    default=LISTEN.runtime_url(LISTEN.port),
    show_default=True,
    show_envvar=True,
    help="Where the runtime API listens. The second name is the AWS command line's.",
)
endpoint_option = click.option(
    "--endpoint",
    default=DEFAULT_ENDPOINT,
    show_default=True,
    shell_complete=complete_endpoints,
    help="The endpoint's name.",
)
keys_option = _keys_option(
    "A file of keys and tokens (docs/access.md); its first key or token is used. "
    f"Without one {CLIENT_TOKEN} is, or what boto3 finds (AWS_ACCESS_KEY_ID, profiles)."
)
admin_url_option = click.option(
    "--admin-url",
    type=Address(),
    envvar=ADMIN_URL,
    default=LISTEN.admin_url(LISTEN.admin_port),
    show_default=True,
    show_envvar=True,
    help="Where the admin plane listens.",
)
admin_keys_option = _keys_option(
    f"A file with the admin plane's token (docs/access.md). Without one {ADMIN_TOKEN} is used."
)


def admin_options(command: F) -> F:
    """Give the command an AdminClient as its first argument."""

    @admin_url_option
    @admin_keys_option
    @functools.wraps(command)
    def with_client(admin_url: str, keys_file: Path | None, **arguments: Any) -> Any:
        return command(AdminClient(admin_url, find_admin_token(keys_file)), **arguments)

    return with_client  # type: ignore[return-value]


def find_admin_token(keys_file: Path | None) -> str:
    """Return the admin token of the file, else of the environment, which may hold the token of another fleet."""
    return read_file(keys_file).admin_token or read_token(ADMIN_TOKEN)


def read_token(name: str) -> str:
    """Return a token of the environment, or "". Raises ConfigError if a header cannot carry it."""
    token = os.environ.get(name, "")
    if not all("!" <= sign <= "~" for sign in token):
        raise ConfigError(f"{name} must be of visible ASCII characters alone")
    return token


def read_file(keys_file: Path | None) -> Credentials:
    """Return the credentials of a file alone, or none without a file. Raises ConfigError."""
    return read_credentials({}, keys_file)


def show(found: Mapping[str, Any], lines: Callable[[], Any], *, as_json: bool) -> None:
    """Print one line of JSON, or lines for people."""
    if as_json:
        click.echo(json.dumps(found))
    else:
        for line in lines():
            click.echo(line)


def report_warning(line: str) -> None:
    """Print a warning: the command continues."""
    click.echo(f"Warning: {without_controls(line)}", err=True)
