"""Options that `ask` and `chat` share: endpoint, session, credentials and sampling."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from torchmoor.cli.conversation import ChatTarget
from torchmoor.cli.options import (
    endpoint_option,
    generation_options,
    keys_option,
    read_file,
    read_token,
    url_option,
)
from torchmoor.clients.signing import Login
from torchmoor.proxy.access.credentials import CLIENT_TOKEN

SESSION = "TORCHMOOR_SESSION"


def conversation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add url, keys_file, endpoint, parameters, session_id, keep and system to a command."""

    @click.option(
        "--session",
        "session_id",
        metavar="ID",
        envvar=SESSION,
        show_envvar=True,
        help="Continue this session, and close it at the end. Other users of this machine can read an id on the "
        "command line, but not in the environment.",
    )
    @click.option("--keep", is_flag=True, help="Leave the session open, and print its id on standard error.")
    @click.option(
        "--system",
        metavar="TEXT",
        help="A system message. Without a session, the whole conversation is sent with each question.",
    )
    @endpoint_option
    @url_option
    @keys_option
    @generation_options
    @functools.wraps(command)
    def checked(**arguments: Any) -> None:
        if arguments["system"] is not None and (arguments["session_id"] or arguments["keep"]):
            raise click.UsageError("--system goes with neither --session nor --keep: a session has no system message")
        before = signal.signal(signal.SIGTERM, _interrupt)  # so that SIGTERM closes the session too
        try:
            command(**arguments)
        finally:
            if signal.getsignal(signal.SIGTERM) is _interrupt:
                signal.signal(signal.SIGTERM, before)

    return checked


def _interrupt(number: int, _: object) -> None:
    """Act as Ctrl-C, once: `timeout` signals a process and then its group, and must not interrupt the close."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def make_target(url: str, endpoint: str, keys_file: Path | None, parameters: Mapping[str, Any]) -> ChatTarget:
    """Combine the options. Raises ConfigError if the file of keys cannot be read."""
    return ChatTarget(url=url, endpoint=endpoint, login=make_login(keys_file), parameters=parameters)


def make_login(keys_file: Path | None) -> Login:
    """Return the file's first key or token, otherwise the environment's token, otherwise boto3's own search."""
    credentials = read_file(keys_file)
    for key_id, key in credentials.keys.items():
        keys = {"aws_access_key_id": key_id, "aws_secret_access_key": key.secret}
        return Login(keys={**keys, "aws_session_token": key.session_token} if key.session_token else keys)
    for token in credentials.tokens.values():
        return Login(token=token)
    return Login(token=read_token(CLIENT_TOKEN))
