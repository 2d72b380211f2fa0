"""Options that `ask` and `chat` share: endpoint, session, credentials and sampling."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from torchmoor.cli.conversation import ChatTarget
from torchmoor.cli.options import (
    HeaderText,
    endpoint_option,
    generation_options,
    keys_option,
    read_file,
    read_token,
    url_option,
)
from torchmoor.cli.terminal_chat import ChatOptions
from torchmoor.clients.signing import Login
from torchmoor.proxy.access.credentials import CLIENT_TOKEN

SESSION = "TORCHMOOR_SESSION"


def target_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command a ChatTarget as `target`, from the options of the endpoint, the caller and the sampling."""

    @endpoint_option
    @url_option
    @keys_option
    @generation_options
    @functools.wraps(command)
    def with_target(
        url: str, endpoint: str, keys_file: Path | None, parameters: Mapping[str, Any], **arguments: Any
    ) -> None:
        login = make_login(keys_file)
        command(target=ChatTarget(url=url, endpoint=endpoint, login=login, parameters=parameters), **arguments)

    return with_target


def conversation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command ChatOptions as `options`, without images and questions."""

    @click.option(
        "--session",
        "session_id",
        type=HeaderText(),
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
        default="",
        help="A system message. It comes with a session's first question and holds for all.",
    )
    @click.option(
        "--adapter",
        type=HeaderText(),
        metavar="NAME",
        default="",
        help="Open the session for this LoRA adapter of the endpoint. A session keeps its adapter.",
    )
    @target_options
    @functools.wraps(command)
    def checked(
        target: ChatTarget,
        session_id: str | None,
        keep: bool,
        system: str,
        adapter: str,
        as_json: bool,
        **arguments: Any,
    ) -> None:
        if adapter and session_id is not None:
            raise click.UsageError("--adapter is for a new session: an open one has its adapter already")
        target = replace(target, adapter=adapter)
        options = ChatOptions(target=target, session_id=session_id, is_kept=keep, system=system, as_json=as_json)
        before = signal.signal(signal.SIGTERM, _interrupt)  # so that SIGTERM closes the session too
        try:
            command(options=options, **arguments)
        finally:
            if signal.getsignal(signal.SIGTERM) is _interrupt:
                signal.signal(signal.SIGTERM, before)

    return checked


def _interrupt(number: int, _: object) -> None:
    """Act as Ctrl-C, once: `timeout` signals a process and then its group, and must not interrupt the close."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def make_login(keys_file: Path | None) -> Login:
    """Return the file's first key or token, otherwise the environment's token, otherwise boto3's own search."""
    credentials = read_file(keys_file)
    for key_id, key in credentials.keys.items():
        keys = {"aws_access_key_id": key_id, "aws_secret_access_key": key.secret}
        return Login(keys={**keys, "aws_session_token": key.session_token} if key.session_token else keys)
    for token in credentials.tokens.values():
        return Login(token=token)
    return Login(token=read_token(CLIENT_TOKEN))
