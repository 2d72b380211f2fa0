"""Command-line options that set a settings field: help text, type and default come from the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic.fields import FieldInfo

from torchmoor.cli.options import Number
from torchmoor.config.error_texts import limits_of
from torchmoor.config.group import SettingsGroup, field_at
from torchmoor.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
GIVEN = "torchmoor.settings"
SEPARATOR = "__"  # instead of the dots of a field's path, in the name of its option


def setting(root: type[SettingsGroup], path: str, *names: str, **attributes: Any) -> Callable[[F], F]:
    """Declare an option for a field.

    path: the field from the root settings, such as "listen.port". attributes: for click.option, instead of the field's.
    An option with `flag_value` sets this value. `given_settings` returns the values that the user gave.
    """
    field = field_at(root, path)
    found: dict[str, Any] = {"help": field.description}
    if "flag_value" in attributes or field.annotation is bool:
        found |= {"is_flag": True, "default": None, "flag_value": True}
    else:
        is_list = get_origin(field.annotation) is tuple
        default = None if field.default in ("", ()) else field.default
        found |= {"type": _type_of(field), "multiple": is_list, "default": default, "show_default": default is not None}

    def store(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        assert parameter.name is not None
        if context.get_parameter_source(parameter.name) is ParameterSource.DEFAULT:
            return
        *groups, key = path.split(".")
        at = context.meta.setdefault(GIVEN, {})
        for group in groups:
            at = at.setdefault(group, {})
        at[key] = _plain(value)

    name = path.replace(".", SEPARATOR)
    return click.option(*names, name, expose_value=False, callback=store, **{**found, **attributes})


def given_settings() -> dict[str, Any]:
    """Return the fields that the running command's options set, as nested keys and values."""
    given: dict[str, Any] = click.get_current_context().meta.get(GIVEN, {})
    return given


@contextmanager
def named_by_options() -> Iterator[None]:
    """In a ConfigError, name the running command's options instead of the fields that they set."""
    try:
        yield
    except ConfigError as error:
        parameters = click.get_current_context().command.params
        options = {each.name.replace(SEPARATOR, "."): each.opts[0] for each in parameters if each.name is not None}
        text = re.sub(r"^\w+(?= must )|\b\w+(?:\.\w+)+", lambda found: options.get(found[0], found[0]), str(error))
        raise ConfigError(text) from error


def _type_of(field: FieldInfo) -> Any:
    """Return the click type for a field's type and range."""
    annotation = next((each for each in get_args(field.annotation) if each is not type(None)), field.annotation)
    if get_origin(field.annotation) is Literal:
        return click.Choice(get_args(field.annotation))
    limits = limits_of(field)
    above, most = limits.get("gt"), limits.get("le")
    if annotation is int:
        return click.IntRange(limits.get("ge") if above is None else above + 1, most)
    if annotation is float:
        return Number(min=limits.get("ge", above), min_open=above is not None, max=most)
    return str


def _plain(value: Any) -> Any:
    """Return paths as text."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return str(value) if isinstance(value, Path) else value
