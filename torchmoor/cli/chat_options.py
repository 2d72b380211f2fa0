"""Options of `ask` and `chat`, some of them of `bench`: endpoint, session, credentials and sampling."""

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
    Number,
    endpoint_option,
    keys_option,
    read_file,
    read_token,
    url_option,
)
from torchmoor.cli.terminal_chat import ChatOptions
from torchmoor.clients.signing import Login
from torchmoor.proxy.access.credential_sources import CLIENT_TOKEN
from torchmoor.wire.sampling_parameters import COUNT, SAMPLING_NUMBERS, NumberRange

SESSION = "TORCHMOOR_SESSION"


def _number(name: str, numbers: NumberRange, help: str) -> Callable[..., Any]:
    """Make the option of a sampling parameter, with the range that workers check."""
    most = numbers.most
    kind: click.ParamType[Any]
    if numbers.is_whole:
        kind = click.IntRange(min=int(numbers.least), max=None if most is None else int(most))
    else:
        kind = Number(min=numbers.least, max=most, min_open=numbers.excludes_least)
    return click.option(f"--{name.replace('_', '-')}", type=kind, help=help)


_SAMPLING = {
    "max_new_tokens": _number("max_new_tokens", COUNT, "Maximum length of the answer, in tokens."),
    **{name: _number(name, row.numbers, row.help) for name, row in SAMPLING_NUMBERS.items() if row.is_option},
    "stop": click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text. Repeatable."),
}


def _sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Pass the sampling options to the command as one mapping, `parameters`, by the runtime API's names."""

    @functools.wraps(command)
    def with_parameters(**arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in _SAMPLING}
        given = {name: value for name, value in values.items() if value not in (None, ())}
        if "stop" in given:
            given["stop"] = list(given["stop"])
        command(parameters=given, **arguments)

    for option in reversed(_SAMPLING.values()):
        with_parameters = option(with_parameters)
    return with_parameters


def target_options(command: Callable[..., None]) -> Callable[..., None]:
    """Pass a ChatTarget to the command as `target`, made of the options for endpoint, credentials and sampling."""

    @endpoint_option
    @url_option
    @keys_option
    @_sampling_options
    @functools.wraps(command)
    def with_target(
        url: str, endpoint: str, keys_file: Path | None, parameters: Mapping[str, Any], **arguments: Any
    ) -> None:
        login = make_login(keys_file)
        command(target=ChatTarget(url=url, endpoint=endpoint, login=login, parameters=parameters), **arguments)

    return with_target


def conversation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Pass ChatOptions to the command as `options`, without images and questions."""

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
        help="A system message for the whole session, sent with its first question.",
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
    """Act as Ctrl-C, but only once: the program `timeout` sends two signals, and the second must not stop the close."""
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
