"""The ranges of the sampling parameters that are numbers: workers check them, the API reference states them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The numbers from `least` to `most`. is_whole: integers only. excludes_least: only those above `least`."""

    least: float
    most: float | None = None
    is_whole: bool = False
    excludes_least: bool = False

    def __contains__(self, number: float) -> bool:
        is_enough = number > self.least if self.excludes_least else number >= self.least
        return is_enough and (self.most is None or number <= self.most)

    @property
    def wanted(self) -> str:
        """The range in words, for an error."""
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
FRACTION = NumberRange(0, 1, excludes_least=True)
TEMPERATURE = NumberRange(0)
PENALTY = NumberRange(-2, 2)  # OpenAI's limits
REPETITION_PENALTY = NumberRange(0.01, 100)
LOGIT_BIAS = NumberRange(-100, 100)
SEED = NumberRange(0, 2**63 - 1, is_whole=True)
TOP_TOKENS = NumberRange(0, 20, is_whole=True)
