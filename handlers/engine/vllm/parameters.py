"""The sampling parameters that vLLM gets, each with its name there. vLLM itself is not imported.

A field of SamplingParams without a row is refused, so a new one is never ignored.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from handlers.engine.contract import SamplingParams

Value = Callable[[SamplingParams], Any]

VALUES: dict[str, tuple[str, Value]] = {  # by field of SamplingParams: vLLM's name, and the value
    "temperature": ("temperature", lambda params: params.temperature if params.do_sample else 0.0),
    "top_k": ("top_k", lambda params: (params.top_k or 0) if params.do_sample else 0),
    "top_p": ("top_p", lambda params: (params.top_p or 1.0) if params.do_sample else 1.0),
    "min_p": ("min_p", lambda params: (params.min_p or 0.0) if params.do_sample else 0.0),
    "repetition_penalty": ("repetition_penalty", lambda params: params.repetition_penalty or 1.0),
    "frequency_penalty": ("frequency_penalty", lambda params: params.frequency_penalty or 0.0),
    "presence_penalty": ("presence_penalty", lambda params: params.presence_penalty or 0.0),
    "logit_bias": ("logit_bias", lambda params: dict(params.logit_bias) or None),
    "seed": ("seed", lambda params: params.seed if params.do_sample else None),
    "top_n_tokens": ("logprobs", lambda params: params.top_n_tokens or 0),
    "ignore_eos": ("ignore_eos", lambda params: params.ignore_eos),
}
# do_sample decides about other rows; `read_lengths` has the lengths, and sampling.py converts the grammar
_ELSEWHERE = frozenset(("do_sample", "max_new_tokens", "min_tokens", "grammar"))
REFUSED = frozenset(each.name for each in fields(SamplingParams)) - VALUES.keys() - _ELSEWHERE


def read_values(params: SamplingParams) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams that VALUES names."""
    return {name: value(params) for name, value in VALUES.values()}


def read_lengths(params: SamplingParams, num_given: int) -> dict[str, int]:
    """Return vLLM's limits of an answer's length. num_given: the number of its tokens that exist already."""
    least = max(0, (params.min_tokens or 0) - num_given)
    return {"max_tokens": params.max_new_tokens - num_given, "min_tokens": least}
