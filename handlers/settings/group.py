"""The base of the handlers' settings: field types, checks, and the wording of configuration errors."""

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, get_args

from annotated_types import Ge, Gt, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from handlers.errors import SettingsError

MIB = 1 << 20
GIB = 1 << 30


def from_text(parse: Callable[[str], Any]) -> BeforeValidator:
    """Parse text from the environment. What cannot be parsed stays text, which the type check refuses."""

    def read(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except (KeyError, ValueError, RecursionError):
            return value

    return BeforeValidator(read)


def _read_items(value: Any) -> Any:
    items = value.split(",") if isinstance(value, str) else value
    return tuple(str(item).strip() for item in items if str(item).strip()) if isinstance(items, list | tuple) else value


Count = Annotated[int, Field(gt=0), from_text(int)]
Size = Annotated[int, Field(ge=0), from_text(int)]  # 0 has a meaning of its own
Number = Annotated[float, from_text(float)]
Positive = Annotated[float, Field(gt=0), from_text(float)]
Switch = Annotated[bool, from_text(lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()])]
Texts = Annotated[tuple[str, ...], BeforeValidator(_read_items)]


class HandlerGroup(BaseModel):
    """Base of the groups. A group is frozen; it checks types, ranges and key names when it is made."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        """Raises SettingsError, which names the key and the value."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError(describe(type(self), error.errors(include_url=False)[0])) from None

    # Without this, pydantic would call __init__ for each group inside a group, and errors would lack their path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def refusal(key: str, text: str) -> PydanticCustomError:
    """Return the error that a group's validator raises about one of its keys. text: "must be ...", with the value."""
    return PydanticCustomError("refused", "{text}", {"key": key, "text": text})


def nested_groups(group: type[HandlerGroup]) -> Iterator[tuple[str, type[HandlerGroup]]]:
    """Yield the names and types of the groups inside a group."""
    for name, field in group.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, HandlerGroup):
            yield name, field.annotation


def describe(group: type[HandlerGroup], details: ErrorDetails) -> str:
    """Return one sentence about one thing that is wrong."""
    path: Sequence[int | str] = details["loc"]
    groups = dict(nested_groups(group))
    if path and path[0] in groups:
        group, groups, path = groups[str(path[0])], {}, path[1:]
    where = ["handler", *filter(None, [group.model_config.get("title")])]
    if details["type"] == "refused":
        return f"{'.'.join([*where, details['ctx']['key']])} {details['ctx']['text']}"
    full = ".".join([*where, *map(str, path)])
    if details["type"] in ("extra_forbidden", "invalid_key"):
        kind = "group of settings" if groups else "setting"
        close = get_close_matches(str(path[-1]), group.model_fields, n=1)
        question = f". Did you mean {close[0]}?" if close else ""
        return f"{full} is not a {kind}; there are {', '.join(group.model_fields)}{question}"
    if not path:
        return f"{full} must be a group of settings, not {details['input']!r}"
    if details["type"] == "value_error":
        return f"{full} {details['ctx']['error']}"
    return f"{full} must {_requirement(group.model_fields[str(path[0])], details)}"


def _requirement(field: FieldInfo, details: ErrorDetails) -> str:
    """Return what a value must be and, unless it is a secret, what it is."""
    limits = {type(each): each for each in field.metadata}
    kind = details["type"]
    if kind == "literal_error":
        *others, last = get_args(field.annotation)
        text = f"be {', '.join(others)} or {last}"
    elif kind == "string_too_short":
        return "not be empty"
    elif kind == "finite_number":
        text = "be finite"
    elif kind.endswith("_type"):
        text = f"be of type {getattr(field.annotation, '__name__', field.annotation)}"
    elif Lt in limits:
        least = f"above {limits[Gt].gt}" if Gt in limits else f"at least {limits[Ge].ge}"
        text = f"be {least} and below {limits[Lt].lt}"
    elif Ge in limits:
        text = "not be negative"
        return f"{text}, not {details['input']!r}"
    else:
        text = "be positive" if limits[Gt].gt == 0 else f"be more than {limits[Gt].gt}"
    return f"{text}, not {details['input']!r}" if field.repr else text
