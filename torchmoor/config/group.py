"""Settings groups: the base model of all settings, shared field types, and the wording of configuration errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from torchmoor.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30

Count = Annotated[int, Field(gt=0)]
Size = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Port = Annotated[int, Field(ge=1, le=65_535)]
OptionalPort = Annotated[int, Field(ge=0, le=65_535)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]  # YAML has lists, and strict tuples refuse them


@dataclass(frozen=True, slots=True)
class Shared:
    """Marks a limit for all proxy processes together: each gets its part. least: the field that bounds a part."""

    least: str = ""


SharedCount = Annotated[Count, Shared()]

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "string": "text",
    "bytes": "bytes",
    "bool": "true or false",
    "tuple": "a list",
    "model": "keys and values",
    "dict": "keys and values",
    "mapping": "keys and values",
}


class SettingsGroup(BaseModel):
    """Base of all settings. A group is frozen, and checks types, ranges and key names when it is made.

    A subclass gives its name in the configuration file as `title`; error messages of a group that is made directly
    begin with it.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        """Raises ConfigError, which names the key and the value and says what is allowed."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_describe(type(self), error, str(self.model_config.get("title", "")))) from None

    # Without this, pydantic would call __init__ for each group inside a group, and errors would lack their path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def read(cls, values: object, where: str = "") -> Self:
        """Check keys and values of a file. where: their path in it. Raises ConfigError."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_describe(cls, error, where)) from None

    def replace(self, **changes: Any) -> Self:
        """Return a checked copy with these values changed. Raises ConfigError."""
        return type(self)(**{**dict(self), **changes})


def like(group: type[SettingsGroup], key: str, **changes: Any) -> Any:
    """Return a field with the default and the description of another group's field. changes: to the field."""
    field = group.model_fields[key]
    return Field(**{"default": field.default, "description": field.description, **changes})


def field_at(group: type[SettingsGroup], path: str) -> FieldInfo:
    """Return the field that a dotted path leads to. Raises KeyError."""
    *names, last = path.split(".")
    for name in names:
        group = next(groups_of(group.model_fields[name].annotation))
    return group.model_fields[last]


def refusal(key: str, text: str) -> PydanticCustomError:
    """Return the error that a group's validator raises about one of its keys. text: "must be ...", with the value."""
    return PydanticCustomError("refused", "{text}", {"key": key, "text": text})


def read_mapping(value: object, where: str, known: set[str]) -> dict[str, Any]:
    """Return keys and values whose keys are all known. Raises ConfigError."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be keys and values, not {value!r}")
    for key in value:
        if key not in known:
            raise ConfigError(f"{where}: {_unknown(key, known)}")
    return value


def read_list(value: object, where: str) -> list[Any]:
    """Return a list of at least one item. Raises ConfigError."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} must be a list of one or more, not {value!r}")
    return value


def groups_of(annotation: object) -> Iterator[type[SettingsGroup]]:
    """Yield the settings groups that a field's type names."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, SettingsGroup):
            yield each


def limits_of(field: FieldInfo) -> dict[str, Any]:
    """Return the numeric limits of a field by their names: gt, ge, le."""
    return {
        name: getattr(each, name)
        for each in field.metadata
        for name, kind in (("gt", Gt), ("ge", Ge), ("le", Le))
        if isinstance(each, kind)
    }


def allowed_range(field: FieldInfo) -> str:
    """Return the numbers that a field allows, as in "must be ...". Empty if it has no limits."""
    match limits_of(field):
        case {"ge": least, "le": most}:
            return f"from {least} to {most}"
        case {"gt": least, "le": most}:
            return f"above {least} and at most {most}"
        case {"ge": least}:
            return f"{least} or more"
        case {"gt": _}:
            return "positive"
    return ""


def _describe(group: type[SettingsGroup], error: ValidationError, where: str) -> str:
    """Return one sentence about the first thing that is wrong."""
    details = error.errors(include_url=False)[0]
    path: Sequence[int | str] = details["loc"]
    kind = details["type"]
    if kind == "refused":
        return f"{_join(where, (*path, details['ctx']['key']))} {details['ctx']['text']}"
    if kind == "extra_forbidden":
        known = _find_group(group, path[:-1])
        return f"{_join(where, path[:-1]) or 'the settings'}: {_unknown(path[-1], known.model_fields)}"
    field = _find_field(group, path)
    name = _join(where, path if field is None or field.alias is None else (*path[:-1], field.alias))
    if kind == "missing":
        return f"{name} is missing"
    if kind == "value_error":
        return f"{name} {details['ctx']['error']}"
    return f"{name} must be {_allowed(details, field)}"


def _allowed(details: ErrorDetails, field: FieldInfo | None) -> str:
    """Return what a value must be and, unless it is a secret, what it is."""
    value = details["input"]
    kind = details["type"]
    if kind == "literal_error":
        expected = f"one of {', '.join(map(str, get_args(field.annotation)))}" if field else details["ctx"]["expected"]
    elif kind.endswith("_type") or kind == "finite_number":
        expected = _EXPECTED.get(kind.partition("_")[0], kind)
        if field is not None and field.annotation == tuple[str, ...]:
            expected = "a list of texts"
    else:
        expected = (allowed_range(field) if field else "") or details["msg"]
    return expected if field is not None and _has_secret(field) else f"{expected}, not {value!r}"


def _has_secret(field: FieldInfo) -> bool:
    """Return True if a field, or a field of a group in it, must not be shown."""
    groups = groups_of(field.annotation)
    return not field.repr or any(_has_secret(each) for group in groups for each in group.model_fields.values())


def _find_field(group: type[SettingsGroup], path: Sequence[int | str]) -> FieldInfo | None:
    """Return the field that a path of an error leads to, or the last field on the way, whose value has no fields."""
    found = None
    for part in path:
        fields = group.model_fields
        field = next((each for name, each in fields.items() if part in (name, each.alias)), None)
        if field is not None:
            found, group = field, next(groups_of(field.annotation), group)
    return found


def _find_group(group: type[SettingsGroup], path: Sequence[int | str]) -> type[SettingsGroup]:
    """Return the group that a path leads to, or the last group on the way."""
    for part in path:
        field = group.model_fields.get(str(part))
        group = next(groups_of(field.annotation), group) if field else group
    return group


def _join(where: str, path: Sequence[int | str]) -> str:
    """Return a path as `access.keys[0].id`."""
    for part in path:
        if isinstance(part, int):
            where += f"[{part}]"
        else:
            where += f".{part}" if where else part
    return where


def _unknown(key: object, known: Mapping[str, Any] | set[str]) -> str:
    return f"unknown key {key!r}; known are {', '.join(sorted(known))}"
