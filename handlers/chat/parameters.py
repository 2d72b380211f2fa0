"""The generation parameters of a request, as TGI names them, checked one by one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handlers.chat.checks import is_bool, is_int, is_number, names
from handlers.engine.sequence import SamplingParams
from handlers.errors import InvalidRequest

MAX_STOP = 16
MAX_STOP_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """None: the client left it to us. The names and meanings are those of Text Generation Inference."""

    do_sample: bool | None = None  # None: sample if a sampling setting is given
    temperature: float | None = None  # 0 means greedy
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    length_field: str = "parameters.max_new_tokens"  # what the client calls that one
    truncate: int | None = None  # keep only this many last tokens of the question
    stop: tuple[str, ...] = ()  # the answer ends before any of these
    return_full_text: bool = False  # the question before the answer
    details: bool = False

    @property
    def is_sampling(self) -> bool:
        if self.temperature == 0:
            return False
        if self.do_sample is not None:
            return self.do_sample
        return any(v is not None for v in (self.temperature, self.top_k, self.top_p, self.typical_p))

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """How the engine is to choose tokens."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            do_sample=self.is_sampling,
            temperature=self.temperature or 1.0,
            top_k=self.top_k,
            top_p=self.top_p,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )


def parse_parameters(given: Any) -> Parameters:
    """Parameters of a request's `parameters` object. Raises InvalidRequest, naming the parameter."""
    if given is None:
        return Parameters()
    if not isinstance(given, Mapping):
        raise InvalidRequest("'parameters' must be an object", param="parameters")
    unknown = set(given) - set(_CHECKS) - set(_ALIASES) - set(_NEUTRAL)
    if unknown:
        raise InvalidRequest(f"parameters has no field {names(unknown)}", param="parameters")
    values: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in _NEUTRAL:
            is_neutral, wanted = _NEUTRAL[name]
            if not is_neutral(value):
                raise InvalidRequest(f"parameters.{name} must be {wanted}", param=f"parameters.{name}")
            continue
        target: str = _ALIASES.get(str(name), str(name))
        if target in values:
            raise InvalidRequest(f"parameters.{name} and another name of it are given", param=f"parameters.{name}")
        values[target] = check_parameter(target, value, f"parameters.{name}")
    return Parameters(**values)


def check_parameter(name: str, value: Any, called: str) -> Any:
    """The value of one of Parameters' fields, as it is kept. called: its name for the client.

    Raises InvalidRequest.
    """
    is_valid, wanted = _CHECKS[name]
    if not is_valid(value):
        raise InvalidRequest(f"{called} must be {wanted}", param=called.strip("'"))
    if name == "stop":
        return tuple(value)
    if name in ("temperature", "top_p", "typical_p", "repetition_penalty"):
        return float(value)  # transformers' warpers refuse whole numbers
    return value


def _is_stop(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_STOP
        and all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in value)
    )


_CHECKS: dict[str, tuple[Any, str]] = {
    "do_sample": (is_bool, "true or false"),
    "temperature": (lambda v: is_number(v) and v >= 0, "a number, 0 (greedy) or more"),
    "top_k": (lambda v: is_int(v) and v >= 1, "a whole number, 1 or more"),
    "top_p": (lambda v: is_number(v) and 0 < v <= 1, "a number above 0, at most 1"),
    "typical_p": (lambda v: is_number(v) and 0 < v <= 1, "a number above 0, at most 1"),
    "repetition_penalty": (lambda v: is_number(v) and 0.01 <= v <= 100, "a number from 0.01 to 100"),
    "seed": (lambda v: is_int(v) and 0 <= v < 2**63, "a whole number from 0 to 2^63 - 1"),
    "max_new_tokens": (lambda v: is_int(v) and v >= 1, "a whole number, 1 or more"),
    "truncate": (lambda v: is_int(v) and v >= 1, "a whole number, 1 or more"),
    "stop": (_is_stop, f"a list of at most {MAX_STOP} texts of 1 to {MAX_STOP_CHARS} characters"),
    "return_full_text": (is_bool, "true or false"),
    "details": (is_bool, "true or false"),
}

_ALIASES = {"stop_sequences": "stop"}  # LMI's name

# Parameters of those protocols that are not offered here: clients send them all the same, with values that ask nothing.
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "watermark": (lambda v: v is False, "false: answers are not watermarked here"),
    "best_of": (lambda v: v == 1, "1: one answer is generated"),
    "decoder_input_details": (lambda v: v is False, "false: nothing is told of the prompt's tokens"),
    "top_n_tokens": (lambda v: v == 0, "0: only the chosen token is told"),
    "frequency_penalty": (lambda v: v == 0, "0: use repetition_penalty"),
    "grammar": (lambda v: False, "absent: answers follow no grammar"),
    "adapter_id": (lambda v: False, "absent: there are no adapters"),
}
