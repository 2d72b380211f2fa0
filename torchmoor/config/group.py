"""Settings groups: the base model of all settings, and shared field types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from torchmoor.config.error_texts import describe, groups_of, unknown_key
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
            raise ConfigError(describe(type(self), error, str(self.model_config.get("title", "")))) from None

    # Without this, pydantic would call __init__ for each group inside a group, and errors would lack their path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def read(cls, values: object, where: str = "") -> Self:
        """Check keys and values of a file. where: their path in it. Raises ConfigError."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(describe(cls, error, where)) from None

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
        group = next(groups_of(group.model_fields[name].annotation, SettingsGroup))
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
            raise ConfigError(f"{where}: {unknown_key(key, known)}")
    return value


def read_list(value: object, where: str) -> list[Any]:
    """Return a list of at least one item. Raises ConfigError."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} must be a list of one or more, not {value!r}")
    return value
