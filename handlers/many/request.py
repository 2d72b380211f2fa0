"""A task request: `inputs` and `parameters`, as in SageMaker's Hugging Face containers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from handlers.errors import InvalidRequest
from handlers.requests.incoming import JSON_TYPES, Incoming, missing_body, refuse_other_media
from handlers.requests.json_values import begins_as_json, load_json
from handlers.settings.tasks import TaskSettings

MAX_NAME = 40
NUMBER_BYTES = 20.0  # of a float in JSON; the mean is 22
ParameterTypes = Mapping[str, type | tuple[type, ...]]  # by name, the accepted types


class TaskForm(Protocol):
    """The form of a request's answer."""

    @property
    def bytes_per_number(self) -> float:
        """The bytes of a vector's number in the answer; 0 if it has no vectors."""
        ...

    def answer(self, result: Any, num_tokens: int) -> dict[str, Any]:
        """Convert the task's result. num_tokens: the sum over all inputs."""
        ...


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """inputs: in the task's form; bytes of an image. form: the answer's; None for the task's own."""

    inputs: Any
    parameters: Mapping[str, Any]
    form: TaskForm | None = None

    def check_parameters(self, known: ParameterTypes) -> None:
        """Raise InvalidRequest for an unknown parameter or a wrong type; null is accepted."""
        for name, value in self.parameters.items():
            if name not in known:
                choices = ", ".join(sorted(known)) or "none"
                raise InvalidRequest(f"there is no parameter {name[:MAX_NAME]!r} here; there are: {choices}")
            kinds = known[name]
            is_number = (
                isinstance(value, bool) and kinds is not bool and not (isinstance(kinds, tuple) and bool in kinds)
            )
            if value is not None and (not isinstance(value, kinds) or is_number):
                raise InvalidRequest(f"the parameter {name!r} has a wrong type", param=name)

    def get(self, name: str, default: Any) -> Any:
        """Return a parameter, or the default if it is missing or null."""
        value = self.parameters.get(name)
        return default if value is None else value

    def positive(self, name: str, default: int | None) -> Any:
        """Return a number, or the default if it is missing or null. Raises InvalidRequest below 1."""
        found = self.get(name, default)
        if found is not None and found < 1:
            raise InvalidRequest(f"the parameter {name!r} must be at least 1", param=name)
        return found


def read_body(incoming: Incoming, max_json_values: int) -> Any:
    """Decode the body by its Content-Type: JSON to its value, text to str, images to bytes.

    Raises InvalidJson, InvalidRequest, UnsupportedMedia.
    """
    kind, body = incoming.media_type, incoming.body
    if not body:
        raise missing_body(incoming)
    refuse_other_media(kind)
    if kind == "text/plain":
        try:
            return body.decode()
        except UnicodeDecodeError as exc:
            raise InvalidRequest("the text is not UTF-8") from exc
    if kind.startswith("image/") or (kind == "application/octet-stream" and not begins_as_json(body)):
        return bytes(body)
    if kind not in JSON_TYPES:
        raise InvalidRequest(f"a body of type {kind[:MAX_NAME]!r} is not read here; send application/json")
    return load_json(body, max_json_values)


def read_request(body: Any) -> TaskRequest:
    """Split a decoded body into inputs and parameters. Raises InvalidRequest."""
    if isinstance(body, bytes | str):
        return TaskRequest(body, {})
    if not isinstance(body, dict):
        raise InvalidRequest('the body must be a JSON object, {"inputs": ..., "parameters": {...}}')
    parameters = body.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest("'parameters' must be a JSON object", param="parameters")
    if "inputs" not in body:
        raise InvalidRequest("the body has no 'inputs'", param="inputs")
    return TaskRequest(body["inputs"], parameters or {})


def texts_of(inputs: Any, settings: TaskSettings) -> list[str]:
    """Return one text or several as a list. Raises InvalidRequest."""
    texts = text_inputs(inputs, settings)
    for text in texts:
        check_text(text, settings.max_chars)
    return texts


def text_inputs(inputs: Any, settings: TaskSettings) -> list[Any]:
    """Return one input that has texts, or several, as a list. Raises InvalidRequest if it is empty or too long."""
    items = as_list(inputs, settings.max_inputs)
    texts = [text for item in items for text in (item.values() if isinstance(item, dict) else (item,))]
    num_chars = sum(len(text) for text in texts if isinstance(text, str))
    if num_chars > settings.max_request_chars:
        limit = settings.max_request_chars
        raise InvalidRequest(f"a request may have {limit} characters in all inputs, not {num_chars}", param="inputs")
    return items


def as_list(inputs: Any, max_inputs: int, param: str = "inputs") -> list[Any]:
    """Return one input or several as a list. Raises InvalidRequest about `param` if it is empty or too long."""
    items = inputs if isinstance(inputs, list) else [inputs]
    if not 0 < len(items) <= max_inputs:
        raise InvalidRequest(f"a request may have 1 to {max_inputs} inputs, not {len(items)}", param=param)
    return items


def check_text(text: Any, max_chars: int, what: str = "'inputs'", param: str = "inputs") -> None:
    """Raise InvalidRequest unless the value is a text within the limit. what: names it; param: its field."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{what} must be a text, or several in a list, for this model", param=param)
    if len(text) > max_chars:
        raise InvalidRequest(f"a text may have {max_chars} characters, not {len(text)}", param=param)
