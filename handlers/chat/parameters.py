"""The generation parameters of a request: names, checks, defaults, and how bodies of every dialect give them.

Sampling parameters that are numbers: torchmoor/wire/sampling_parameters.py. The others are rows of `Parameters`. Bodies
of TGI, LMI and the session API have them in an object (`parse_parameters`), OpenAI's beside the other fields
(`read_openai_parameters`).
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any

from handlers.chat.checks import is_bool, is_int, is_number, names
from handlers.chat.grammar_fields import read_tgi_grammar
from handlers.chat.tools import ToolUse
from handlers.engine.contract import Capabilities, GrammarText, SamplingParams
from handlers.errors import InvalidRequest
from torchmoor.wire.sampling_parameters import (
    COUNT,
    LOGIT_BIAS,
    SAMPLING_NUMBERS,
    TOP_TOKENS,
    NumberRange,
    SamplingNumbers,
)

MAX_STOP = 16
MAX_STOP_CHARS = 256
MAX_BIASED = 1024
SEED_BITS = 53  # of a random seed, which every client reads exactly from JSON
UNKNOWN_HINT = "unknown fields must be left out"
LEAST_TOP_P = 1e-9  # leaves the likeliest token, as OpenAI's 0 does
NUM_SEEDS = 2**63  # that are not negative
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Rule:
    """The check of one parameter. wanted: describes valid values, for an error. openai: its names in OpenAI's API.

    convert: applied to a valid value.
    """

    is_valid: Callable[[Any], bool]
    wanted: str
    convert: Callable[[Any], Any]
    openai: tuple[str, ...]


def _row(
    is_valid: Callable[[Any], bool],
    wanted: str,
    *,
    default: Any = None,
    convert: Callable[[Any], Any] = lambda value: value,
    openai: tuple[str, ...] = (),
) -> Any:
    return field(default=default, metadata={"rule": Rule(is_valid, wanted, convert, openai)})


def _check_number(numbers: NumberRange, openai: tuple[str, ...]) -> Rule:
    """Make the rule of a number. Numbers that need not be whole become floats."""
    is_kind, kind = (is_int, int) if numbers.is_whole else (is_number, float)
    return Rule(
        lambda value: is_kind(value) and value in numbers,
        numbers.wanted,
        lambda value: None if numbers.is_off(value) else kind(value),
        openai,
    )


def _number(numbers: NumberRange, *, openai: tuple[str, ...] = ()) -> Any:
    return field(default=None, metadata={"rule": _check_number(numbers, openai)})


def _is_stop(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_STOP
        and all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in value)
    )


def _is_bias(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) <= MAX_BIASED
        and all(isinstance(token, str) and TOKEN_ID.fullmatch(token) for token in value)
        and all(is_number(bias) and bias in LOGIT_BIAS for bias in value.values())
    )


_FLAG = "true or false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters(SamplingNumbers):
    """Names and meanings are TGI's. None: the request does not set it.

    Numbers become floats where transformers' warpers refuse integers.
    """

    do_sample: bool | None = _row(is_bool, _FLAG)  # None: sample if a parameter that starts sampling is given
    logit_bias: tuple[tuple[int, float], ...] = _row(  # added to the tokens' logits; the limits exclude tokens
        _is_bias,
        f"an object of at most {MAX_BIASED} token ids, each with {LOGIT_BIAS.wanted}",
        default=(),
        convert=lambda v: tuple((int(token), float(bias)) for token, bias in v.items()),
        openai=("logit_bias",),
    )
    # Number of likeliest tokens to report with each chosen one:
    top_n_tokens: int | None = _number(TOP_TOKENS, openai=("top_logprobs",))
    max_new_tokens: int | None = _number(COUNT, openai=("max_tokens", "max_completion_tokens"))
    truncate: int | None = _number(COUNT)  # keep only this many last tokens of the question
    stop: tuple[str, ...] = _row(  # the answer ends before any of these
        _is_stop,
        f"a list of at most {MAX_STOP} texts of 1 to {MAX_STOP_CHARS} characters",
        default=(),
        convert=tuple,
        openai=("stop",),
    )
    ignore_eos: bool = _row(is_bool, _FLAG, default=False, openai=("ignore_eos",))  # do not end at end tokens
    return_full_text: bool = _row(is_bool, _FLAG, default=False)  # the question before the answer
    details: bool = _row(is_bool, _FLAG, default=False)
    grammar: GrammarText | None = _row(  # noqa: RUF009 -- frozen, too
        lambda v: isinstance(v, Mapping), "an object with a type and a value", convert=read_tgi_grammar
    )
    tools: ToolUse | None = None  # tools that the answer may call; each dialect has its own fields for them
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # for the chat template
    reasoning_field: str = ""  # the field that requests reasoning, for errors; empty without one
    length_field: str = "parameters.max_new_tokens"  # the client's name of max_new_tokens, for errors

    @property
    def is_sampling(self) -> bool:
        if self.temperature == 0:
            return False
        if self.do_sample is not None:
            return self.do_sample
        return any(getattr(self, name) is not None for name, row in SAMPLING_NUMBERS.items() if row.starts_sampling)

    @property
    def tool_definitions(self) -> Sequence[dict[str, Any]]:
        return () if self.tools is None else self.tools.definitions

    @property
    def num_tool_chars(self) -> int:
        return 0 if self.tools is None else self.tools.num_chars

    def check_tokens(self, vocabulary: int) -> None:
        """Raise InvalidRequest if logit_bias has a token that the model does not have."""
        for token, _ in self.logit_bias:
            if token >= vocabulary:
                raise InvalidRequest(
                    f"logit_bias names token {token}, but the model has {vocabulary} tokens", param="logit_bias"
                )

    def sampling(self, max_new_tokens: int, grammar: Any = None) -> SamplingParams:
        """Return the engine's parameters. grammar: the compiled one, which alone decides where the answer ends."""
        values = {name: getattr(self, name) for name in _SHARED_WITH_ENGINE}
        if grammar is not None:
            values |= {"ignore_eos": False, "min_tokens": None}
        chosen = {"max_new_tokens": max_new_tokens, "do_sample": self.is_sampling, "grammar": grammar}
        return SamplingParams(**{**values, **chosen, "temperature": self.temperature or 1.0})


def draw_seed() -> int:
    """Return the seed of a sampled answer whose request has none."""
    return secrets.randbits(SEED_BITS)


def check_supported(params: SamplingParams, capabilities: Capabilities) -> None:
    """Raise InvalidRequest for a parameter that the engine lacks."""
    for each in fields(params):
        if each.name in capabilities.refused and getattr(params, each.name) != each.default:
            name = each.name
            raise InvalidRequest(f"the engine {capabilities.engine} does not support {name}", param=name)


RULES: dict[str, Rule] = {
    **{name: _check_number(row.numbers, (name,) if row.is_openai else ()) for name, row in SAMPLING_NUMBERS.items()},
    **{each.name: each.metadata["rule"] for each in fields(Parameters) if "rule" in each.metadata},
}
OPENAI_NAMES = {called: name for name, rule in RULES.items() for called in rule.openai}
_SHARED_WITH_ENGINE = [each.name for each in fields(SamplingParams) if each.name in RULES]


def check_fields(what: str, body: Mapping[str, Any], fields: Set[str]) -> None:
    """Raise InvalidRequest if a body has other fields than these; says so if they belong in `parameters`."""
    unknown = body.keys() - fields
    if unknown:
        is_misplaced = "parameters" in fields and unknown <= RULES.keys() | _ALIASES.keys()
        hint = "send what controls generation in 'parameters'" if is_misplaced else UNKNOWN_HINT
        raise InvalidRequest(f"{what} has no field {names(unknown)}; {hint}")


def parse_parameters(given: Any) -> Parameters:
    """Read the object `parameters` of TGI, LMI and the session API. Raises InvalidRequest, which names the field."""
    if given is None:
        return Parameters()
    if not isinstance(given, Mapping):
        raise InvalidRequest("'parameters' must be an object", param="parameters")
    unknown = set(given) - set(RULES) - set(_ALIASES) - set(_NEUTRAL)
    if unknown:
        raise InvalidRequest(f"parameters has no field {names(unknown)}; {UNKNOWN_HINT}", param="parameters")
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
            raise InvalidRequest(f"parameters.{name} is set under two names; send one", param=f"parameters.{name}")
        values[target] = check_parameter(target, value, f"parameters.{name}")
    return Parameters(**values)


def read_openai_parameters(given: Mapping[str, Any], fields: Mapping[str, str] = OPENAI_NAMES) -> dict[str, Any]:
    """Return the values of Parameters that a body of OpenAI's APIs gives. Raises InvalidRequest, which names the field.

    fields: of Parameters, by their names in the body.
    """
    values: dict[str, Any] = {}
    for called, name in fields.items():
        if called in given:
            value = check_parameter(name, _in_range_of_all(name, given[called]), f"'{called}'")
            if values.get(name, value) != value:
                both = " and ".join(f"'{each}'" for each in fields if fields[each] == name)
                raise InvalidRequest(f"{both} have different values; send one of them", param=called)
            values[name] = value
            if name == "max_new_tokens":
                values["length_field"] = called
    return values


def _in_range_of_all(name: str, value: Any) -> Any:
    """Return a value that OpenAI's API allows, and other dialects do not, as one with the same effect."""
    if name == "stop" and isinstance(value, str):
        return [value]
    if name == "top_p" and is_number(value) and value == 0:
        return LEAST_TOP_P
    if name == "seed" and is_int(value) and -NUM_SEEDS <= value < 0:
        return value + NUM_SEEDS
    return value


def check_parameter(name: str, value: Any, called: str) -> Any:
    """Check and convert the value of a field of Parameters. called: the client's name for it.

    Raises InvalidRequest.
    """
    rule = RULES[name]
    if not rule.is_valid(value):
        raise InvalidRequest(f"{called} must be {rule.wanted}", param=called.strip("'"))
    return rule.convert(value)


_ALIASES = {  # LMI's, TGI's and transformers' names
    "stop_sequences": "stop",
    "ignore_eos_token": "ignore_eos",
    "min_new_tokens": "min_tokens",
}

Neutral = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Unsupported fields: a check for the values that have no effect, and their description for an error."""

# Unsupported parameters that clients send anyway, with the values that have no effect.
# Of vLLM, which LMI's documentation lists, too:
NEUTRAL_OF_VLLM: Neutral = {
    "best_of": (lambda v: v == 1, "1: one answer is generated"),
    "length_penalty": (lambda v: is_number(v) and v == 1, "1: there is no beam search"),
    "early_stopping": (lambda v: v is False, "false: there is no beam search"),
    "skip_special_tokens": (lambda v: v is True, "true: texts have no special tokens"),
    "spaces_between_special_tokens": (lambda v: v is True, "true: texts have no special tokens"),
    "include_stop_str_in_output": (lambda v: v is False, "false: the answer ends before the stop string"),
    "stop_token_ids": (lambda v: v == [], "absent: use 'stop'"),
}
# Of TGI and LMI:
_NEUTRAL: Neutral = {
    **NEUTRAL_OF_VLLM,
    "n": (lambda v: v == 1, "1: one answer is generated"),
    "num_beams": (lambda v: v == 1, "1: there is no beam search"),
    "watermark": (lambda v: v is False, "false: answers are not watermarked here"),
    "decoder_input_details": (lambda v: v is False, "false: details of the prompt's tokens are not returned"),
    "adapter_id": (lambda v: False, "absent: the target model names the adapter"),
    "sagemaker_base_url": (lambda v: True, "anything: LiteLLM sends its own setting"),
}
