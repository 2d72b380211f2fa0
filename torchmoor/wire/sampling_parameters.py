"""The sampling parameters that are numbers: one table for requests, engines, the API reference and the commands.

Each row is a field of SamplingNumbers. What a parameter does is in the engines' samplers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The numbers from `least` to `most`. is_whole: integers only. excludes_least: only those above `least`.

    words: the range in other words, for errors. most_off: numbers up to this one have no effect.
    """

    least: float
    most: float | None = None
    is_whole: bool = False
    excludes_least: bool = False
    words: str = ""
    most_off: float | None = None

    def __contains__(self, number: float) -> bool:
        is_enough = number > self.least if self.excludes_least else number >= self.least
        return is_enough and (self.most is None or number <= self.most)

    def is_off(self, number: float) -> bool:
        """Return whether the number has no effect, as if the request did not have it."""
        return self.most_off is not None and number <= self.most_off

    @property
    def wanted(self) -> str:
        """The range in words, for an error."""
        if self.words:
            return self.words
        noun = "a whole number" if self.is_whole else "a number"
        if self.most is None:
            return f"{noun}, {self.least} or more"
        if self.excludes_least:
            return f"{noun} above {self.least}, at most {self.most}"
        return f"{noun} from {self.least} to {self.most}"

    @property
    def schema(self) -> dict[str, Any]:
        """The range as a JSON schema."""
        least = "exclusiveMinimum" if self.excludes_least else "minimum"
        most = {} if self.most is None else {"maximum": self.most}
        return {"type": "integer" if self.is_whole else "number", least: self.least, **most}


COUNT = NumberRange(1, is_whole=True)
NATURAL = NumberRange(0, is_whole=True)
FRACTION = NumberRange(0, 1, excludes_least=True)
PENALTY = NumberRange(-2, 2)  # OpenAI's limits
LOGIT_BIAS = NumberRange(-100, 100)
TOP_TOKENS = NumberRange(0, 20, is_whole=True)


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """What all but the samplers must know of a parameter.

    help: a sentence for the API reference and the commands. starts_sampling: a request with it is sampled unless
    do_sample is false. is_penalty: it changes greedy answers, too. is_openai: OpenAI's bodies have it under the same
    name. is_option: `ask`, `chat` and `bench` have an option for it.
    """

    numbers: NumberRange
    help: str
    starts_sampling: bool = False
    is_penalty: bool = False
    is_openai: bool = False
    is_option: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The values and their meaning as a JSON schema."""
        return {**self.numbers.schema, "description": self.help}


def _row(numbers: NumberRange, help: str, **flags: bool) -> Any:
    return field(default=None, metadata={"row": ParameterRow(numbers, help, **flags)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """The sampling parameters that are numbers, of a request or of an engine's answer. None: not given."""

    temperature: float | None = _row(
        NumberRange(0, words="a number, 0 (greedy) or more"),
        "Sample at this temperature. Default: greedy.",
        starts_sampling=True,
        is_openai=True,
        is_option=True,
    )
    top_k: int | None = _row(
        NumberRange(-1, is_whole=True, words="a whole number, 1 or more, or 0 or -1 for no limit", most_off=0),
        "Sample only among this number of likeliest tokens. 0 and -1: no limit.",
        starts_sampling=True,
        is_openai=True,
        is_option=True,
    )
    top_p: float | None = _row(
        FRACTION,
        "Sample only among the likeliest tokens whose probabilities add up to this.",
        starts_sampling=True,
        is_openai=True,
        is_option=True,
    )
    min_p: float | None = _row(
        NumberRange(0, 1),
        "Sample only among tokens whose probability is at least this part of the likeliest token's.",
        starts_sampling=True,
        is_openai=True,
        is_option=True,
    )
    typical_p: float | None = _row(
        FRACTION, "Sample only among the most typical tokens whose probabilities add up to this.", starts_sampling=True
    )
    repetition_penalty: float | None = _row(
        NumberRange(0.01, 100),
        "Above 1, repetition becomes less likely.",
        is_penalty=True,
        is_openai=True,
        is_option=True,
    )
    frequency_penalty: float | None = _row(
        PENALTY,
        "Above 0, tokens become less likely with each occurrence in the answer.",
        is_penalty=True,
        is_openai=True,
    )
    presence_penalty: float | None = _row(
        PENALTY,
        "Above 0, tokens that occur in the answer become less likely.",
        is_penalty=True,
        is_openai=True,
    )
    seed: int | None = _row(
        NumberRange(0, 2**63 - 1, is_whole=True, words="a whole number from 0 to 2^63 - 1"),
        "The same seed gives the same sample.",
        is_openai=True,
        is_option=True,
    )
    min_tokens: int | None = _row(
        NATURAL,
        "No end token or stop text ends the answer before this number of tokens.",
        is_openai=True,
        is_option=True,
    )


SAMPLING_NUMBERS: dict[str, ParameterRow] = {each.name: each.metadata["row"] for each in fields(SamplingNumbers)}
