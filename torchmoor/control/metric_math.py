"""CloudWatch's metric math: evaluates the expressions of GetMetricData on series of points.

A value is a number, a series, or a list of series. Operators and functions apply to a series point by point; two series
have a result where both have a point.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torchmoor.errors import RequestInvalid

MAX_DEPTH = 40  # depth of parentheses, and of expressions that refer to others
MAX_FILLED = 10_000
MAX_SERIES = 500  # of a list
REPEAT = "REPEAT"
Number = Callable[[float, float], float]


@dataclass(frozen=True, slots=True)
class Series:
    """Points by their times. period: in seconds."""

    points: Mapping[int, float]
    period: int


Value = float | Series | list[Series]

_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)|(\w+)|\"(\w*)\"|(&&|\|\||[=!<>]=|[-+*/^()<>,\[\]]))\s*")
_OPERATORS: dict[str, tuple[int, Number]] = {
    "||": (1, lambda left, right: bool(left or right)),
    "OR": (1, lambda left, right: bool(left or right)),
    "&&": (2, lambda left, right: bool(left and right)),
    "AND": (2, lambda left, right: bool(left and right)),
    "==": (3, operator.eq),
    "!=": (3, operator.ne),
    "<": (3, operator.lt),
    "<=": (3, operator.le),
    ">": (3, operator.gt),
    ">=": (3, operator.ge),
    "+": (4, operator.add),
    "-": (4, operator.sub),
    "*": (5, operator.mul),
    "/": (5, operator.truediv),
    "^": (7, operator.pow),
}
_NEGATION = 6
_POINTWISE: dict[str, Callable[[float], float]] = {"ABS": abs, "CEIL": math.ceil, "FLOOR": math.floor}
_COMBINED: dict[str, Callable[[Sequence[float]], float]] = {
    "AVG": lambda values: sum(values) / len(values),
    "MAX": max,
    "MIN": min,
    "SUM": sum,
}
_FUNCTIONS = (*_POINTWISE, *_COMBINED, "DIFF", "FILL", "IF", "METRICS", "PERIOD", "RATE")


@dataclass
class MetricMath:
    """Evaluates expressions by their ids. metrics: the series of the other queries. start, end: of the request."""

    expressions: Mapping[str, str]
    metrics: Mapping[str, Series]
    start: float
    end: float
    _open: list[str] = field(default_factory=list)
    _found: dict[str, Value] = field(default_factory=dict)

    def find(self, name: str) -> Value:
        """Return the value of a query. Raises RequestInvalid."""
        if name in self.metrics:
            return self.metrics[name]
        if name in self._found:
            return self._found[name]
        if name not in self.expressions:
            raise RequestInvalid(f"Expression: there is no query with the Id {name!r}.")
        if name in self._open or len(self._open) >= MAX_DEPTH:
            raise RequestInvalid(f"Expression: the queries {', '.join((*self._open, name))} refer to each other.")
        self._open.append(name)
        try:
            self._found[name] = _Expression(self, self.expressions[name]).read()
        finally:
            self._open.pop()
        return self._found[name]

    def fill(self, series: Series, value: float | str) -> Series:
        """Return a series with a point for each period of the request: a number, or the point before."""
        last = value if isinstance(value, float) else None
        points = {}
        first = int(self.start - self.start % series.period)
        if self.end - first > MAX_FILLED * series.period:
            raise RequestInvalid(f"FILL makes at most {MAX_FILLED} points: ask for a shorter time or a longer Period.")
        for at in range(first, math.ceil(self.end), series.period):
            found = series.points.get(at, last)
            if found is not None:
                points[at] = found
            if value == REPEAT:
                last = found
        return Series(points, series.period)


class _Expression:
    """Reads one expression and evaluates it."""

    def __init__(self, math: MetricMath, text: str) -> None:
        self._math = math
        self._text = text
        self._tokens = _split(text)
        self._depth = 0

    def read(self) -> Value:
        value = self._read(0)
        if self._tokens:
            raise self._bad(f"{self._tokens[0]!r} is not expected")
        return value

    def _read(self, least: int) -> Value:
        """Read operands while the operators between them have more than this precedence."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._bad("it is too deep")
        value = self._read_operand()
        while self._tokens and self._tokens[0] in _OPERATORS and _OPERATORS[self._tokens[0]][0] > least:
            precedence, compute = _OPERATORS[self._tokens.pop(0)]
            value = _combine(compute, value, self._read(precedence))
        self._depth -= 1
        return value

    def _read_operand(self) -> Value:
        token = self._take()
        if token == "-":
            return _combine(operator.mul, -1.0, self._read(_NEGATION))
        if token == "(":
            value = self._read(0)
            self._expect(")")
            return value
        if token == "[":
            found = [each for value in self._read_list("]") for each in self._as_series(value)]
            if len(found) > MAX_SERIES:
                raise self._bad(f"a list has at most {MAX_SERIES} series")
            return found
        if token[0].isdecimal() or token[0] == ".":
            number = float(token)
            if not math.isfinite(number):
                raise self._bad(f"{token!r} is not expected")
            return number
        if self._tokens and self._tokens[0] == "(":
            self._take()
            return self._call(token)
        if token[0].isalpha():
            return self._math.find(token)
        raise self._bad(f"{token!r} is not expected")

    def _call(self, name: str) -> Value:
        if name not in _FUNCTIONS:
            raise self._bad(f"{name[:64]} is not supported; supported: {', '.join(_FUNCTIONS)}")
        if name == "METRICS":
            return self._read_metrics()
        if name == "FILL":
            return self._read_fill()
        given = self._read_list(")")
        if name == "IF":
            if len(given) not in (2, 3):
                raise self._bad("IF has two or three arguments")
            return _choose(given[0], given[1], given[2] if len(given) > 2 else None)
        if len(given) != 1:
            raise self._bad(f"{name} has one argument, such as m1 or [m1, m2]")
        value = given[0]
        if name in _COMBINED:
            return _reduce(_COMBINED[name], value)
        if isinstance(value, float) or (name == "PERIOD" and value == []):
            raise self._bad(f"{name} needs a series")
        if name == "PERIOD":
            return float(self._as_series(value)[0].period)
        if name in _POINTWISE:
            compute = _POINTWISE[name]
            return _each(value, lambda series: {at: float(compute(point)) for at, point in series.points.items()})
        return _each(value, lambda series: _differences(series, is_rate=name == "RATE"))

    def _read_metrics(self) -> list[Series]:
        """Read METRICS() or METRICS("part of their ids")."""
        part = "" if self._tokens[:1] == [")"] else self._take().strip('"')
        self._expect(")")
        return [series for name, series in self._math.metrics.items() if part in name]

    def _read_fill(self) -> Value:
        """Read the arguments of FILL."""
        value = self._read(0)
        self._expect(",")
        filler: Value | str = self._take() if self._tokens[:1] == [REPEAT] else self._read(0)
        self._expect(")")
        if not isinstance(filler, float | str):
            raise self._bad("FILL needs a number or REPEAT")
        if isinstance(value, float):
            raise self._bad("FILL needs a series")
        return _each(value, lambda series: self._math.fill(series, filler).points)

    def _read_list(self, end: str) -> list[Value]:
        values = [self._read(0)]
        while self._tokens[:1] == [","]:
            self._take()
            values.append(self._read(0))
        self._expect(end)
        return values

    def _as_series(self, value: Value) -> list[Series]:
        if isinstance(value, float):
            raise self._bad("a list has series, not numbers")
        return value if isinstance(value, list) else [value]

    def _take(self) -> str:
        if not self._tokens:
            raise self._bad("its end is missing")
        return self._tokens.pop(0)

    def _expect(self, token: str) -> None:
        if self._tokens[:1] != [token]:
            raise self._bad(f"{token!r} is missing")
        self._take()

    def _bad(self, why: str) -> RequestInvalid:
        return RequestInvalid(f"Expression {self._text[:200]!r}: {why}.")


def _split(text: str) -> list[str]:
    tokens = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise RequestInvalid(f"Expression {text[:200]!r}: {text[position : position + 20]!r} is not expected.")
        tokens.append(match[0].strip())
        position = match.end()
    return tokens


def _combine(compute: Number, left: Value, right: Value) -> Value:
    """Apply an operator; a point without a result, such as a quotient by 0, is left out."""
    if isinstance(left, list):
        if isinstance(right, list):
            raise RequestInvalid("Expression: an operator has a list on one side only.")
        return [_join(compute, item, right) for item in left]
    if isinstance(right, list):
        return [_join(compute, left, item) for item in right]
    if isinstance(left, float) and isinstance(right, float):
        found = _compute(compute, left, right)
        return math.nan if found is None else found
    return _join(compute, left, right)


def _join(compute: Number, left: float | Series, right: float | Series) -> Series:
    """Apply an operator to each point; at least one side is a series."""
    series = [each for each in (left, right) if isinstance(each, Series)]
    points = {}
    for at in series[0].points:
        pair = [each if isinstance(each, float) else each.points.get(at) for each in (left, right)]
        found = None if pair[0] is None or pair[1] is None else _compute(compute, pair[0], pair[1])
        if found is not None:
            points[at] = found
    return Series(points, max(each.period for each in series))


def _compute(compute: Number, left: float, right: float) -> float | None:
    try:
        found = compute(left, right)
        return float(found) if math.isfinite(found) else None
    except (ArithmeticError, TypeError):  # the second: a root of a negative number is complex
        return None


def _choose(condition: Value, then: Value, otherwise: Value | None) -> Value:
    """Return points of `then` where the condition is not 0, and of `otherwise` where it is 0."""
    if isinstance(condition, list) or isinstance(then, list) or isinstance(otherwise, list):
        raise RequestInvalid("Expression: IF takes numbers and series, not lists.")
    if isinstance(condition, float):
        if condition:
            return then
        return Series({}, 60) if otherwise is None else otherwise
    points = {}
    for at, is_met in condition.points.items():
        chosen = then if is_met else otherwise
        found = chosen.points.get(at) if isinstance(chosen, Series) else chosen
        if found is not None:
            points[at] = found
    return _finite(points, condition.period)


def _reduce(compute: Callable[[Sequence[float]], float], value: Value) -> Value:
    """Reduce one series to a number, or several series to one, point by point."""
    if isinstance(value, float):
        return value
    if isinstance(value, Series):
        return float(compute([*value.points.values()])) if value.points else math.nan
    times = sorted({at for series in value for at in series.points})
    return _finite(
        {at: float(compute([series.points[at] for series in value if at in series.points])) for at in times},
        max((series.period for series in value), default=60),
    )


def _differences(series: Series, *, is_rate: bool) -> dict[int, float]:
    """Return the changes between neighbouring points; is_rate: per second."""
    points = sorted(series.points.items())
    return {at: (value - old) / (at - before if is_rate else 1) for (before, old), (at, value) in pairwise(points)}


def _each(value: Series | list[Series], compute: Callable[[Series], Mapping[int, float]]) -> Value:
    if isinstance(value, list):
        return [_finite(compute(each), each.period) for each in value]
    return _finite(compute(value), value.period)


def _finite(points: Mapping[int, float], period: int) -> Series:
    """Return a series without the points that have no number: JSON has none for them, and functions no result."""
    return Series({at: value for at, value in points.items() if math.isfinite(value)}, period)
