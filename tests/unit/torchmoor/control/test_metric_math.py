"""CloudWatch's metric math on series of points."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmoor.control.metric_math import MetricMath, Series, Value
from torchmoor.errors import RequestInvalid

METRICS = {
    "calls": Series({0: 10.0, 60: 20.0, 180: 40.0}, 60),
    "errors": Series({0: 1.0, 60: 0.0, 120: 5.0}, 60),
    "none": Series({0: 0.0, 60: 0.0}, 60),
}


def evaluate(text: str, **others: str) -> Value:
    return MetricMath({"e": text, **others}, METRICS, 0, 240).find("e")


def points(text: str, **others: str) -> dict[int, float]:
    found = evaluate(text, **others)
    return dict(found.points)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("errors / calls * 100", {0: 10.0, 60: 0.0}),
        ("100*errors/(calls+errors)", {0: 100 / 11, 60: 0.0}),
        ("calls / none", {}),  # a quotient by 0 has no point
        ("-calls + 1", {0: -9.0, 60: -19.0, 180: -39.0}),
        ("2 ^ 3 ^ 1 * errors", {0: 8.0, 60: 0.0, 120: 40.0}),
        ("-none ^ 2 - 1", {0: -1.0, 60: -1.0}),
        ("calls > 15 && calls != 40", {0: 0.0, 60: 1.0, 180: 0.0}),
        ("calls == 10 OR calls >= 40", {0: 1.0, 60: 0.0, 180: 1.0}),
        ("IF(errors > 0, errors, -1)", {0: 1.0, 60: -1.0, 120: 5.0}),
        ("IF(errors, calls)", {0: 10.0}),
        ("SUM([calls, errors])", {0: 11.0, 60: 20.0, 120: 5.0, 180: 40.0}),
        ('MAX(METRICS("r"))', {0: 1.0, 60: 0.0, 120: 5.0}),
        ("AVG(METRICS())", {0: 11 / 3, 60: 20 / 3, 120: 5.0, 180: 40.0}),
        ("calls / MAX(calls)", {0: 0.25, 60: 0.5, 180: 1.0}),
        ("FILL(calls, 0)", {0: 10.0, 60: 20.0, 120: 0.0, 180: 40.0}),
        ("FILL(calls, REPEAT)", {0: 10.0, 60: 20.0, 120: 20.0, 180: 40.0}),
        ("calls / PERIOD(calls)", {0: 10 / 60, 60: 20 / 60, 180: 40 / 60}),
        ("DIFF(calls)", {60: 10.0, 180: 20.0}),
        ("RATE(calls)", {60: 10 / 60, 180: 20 / 120}),
        ("CEIL(errors / 2)", {0: 1.0, 60: 0.0, 120: 3.0}),
        ("CEIL(FILL(calls, 0 / 0))", {0: 10.0, 60: 20.0, 180: 40.0}),  # no number fills nothing
        ("FLOOR(IF(errors > 0, errors, 1 / 0))", {0: 1.0, 120: 5.0}),
        ("SUM([calls * 4e306, calls * 4e306])", {0: 8e307, 60: 1.6e308}),  # more has no point
    ],
)
def test_expressions_are_evaluated_point_by_point(text: str, expected: dict[int, float]) -> None:
    assert points(text) == pytest.approx(expected)


def test_expressions_name_other_expressions() -> None:
    assert points("rate + 1", rate="errors / calls") == {0: 1.1, 60: 1.0}


def test_a_list_stays_a_list() -> None:
    found = evaluate("METRICS() * 2")

    assert [dict(each.points)[0] for each in found] == [20.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("calls +", "its end is missing"),
        ("(calls", r"'\)' is missing"),
        ("calls calls", "'calls' is not expected"),
        ("calls ; 1", "'; 1' is not expected"),
        ("m9", "no query with the Id 'm9'"),
        ("e + 1", "the queries e, e refer to each other"),
        ("SEARCH(calls)", "SEARCH is not supported; supported: ABS"),
        ("RATE(1)", "RATE needs a series"),
        ('PERIOD(METRICS("other"))', "PERIOD needs a series"),
        ("IF(calls)", "IF has two or three arguments"),
        ("[1]", "a list has series"),
        ("METRICS() * METRICS()", "a list on one side only"),
        (f"[{','.join(['METRICS()'] * 200)}]", "at most 500 series"),
        ("calls + 1e999", "'1e999' is not expected"),
        ("calls + ²", "'²' is not expected"),
        ("(" * 900 + "calls" + ")" * 900, "it is too deep"),
        ("-" * 900 + "calls", "it is too deep"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(text: str, problem: str) -> None:
    with pytest.raises(RequestInvalid, match=problem):
        evaluate(text)


def make_expression(rng: Random, depth: int = 0) -> str:
    def part() -> str:
        return make_expression(rng, depth + 1)

    kind = "term" if depth > 3 else rng.choice(("term", "term", "operator", "negation", "list", "FILL", "IF", "other"))
    match kind:
        case "term":
            return rng.choice(("calls", "errors", "none", "other", "0", ".5", "1e308", "METRICS()", 'METRICS("x")'))
        case "operator":
            operator = rng.choice(("+", "-", "*", "/", "^", "<", "<=", "==", "!=", "&&", "OR"))
            return f"({part()} {operator} {part()})"
        case "negation":
            return f"-{part()}"
        case "list":
            return f"[{part()}, {part()}]"
        case "FILL":
            return f"FILL({part()}, {rng.choice((part(), 'REPEAT'))})"
        case "IF":
            return f"IF({part()}, {part()}, {part()})"
    name = rng.choice(("ABS", "AVG", "CEIL", "DIFF", "FLOOR", "MAX", "MIN", "PERIOD", "RATE", "SUM"))
    return f"{name}({part()})"


@given(st.randoms(use_true_random=True))
def test_every_expression_has_finite_points_or_is_refused(rng: Random) -> None:
    for _ in range(10):
        text, other = make_expression(rng), make_expression(rng)
        try:
            found = evaluate(text, other=other)
        except RequestInvalid:
            continue
        for series in found if isinstance(found, list) else [found]:
            finite = isinstance(series, float) or all(map(math.isfinite, series.points.values()))
            assert finite, (text, other)


def test_expressions_that_double_take_no_time() -> None:
    """Each expression is evaluated once, however often others use it, so doubling expressions take linear time."""
    doubled = {f"d{number}": f"d{number - 1} + d{number - 1}" for number in range(1, 30)}

    assert points("d29", d0="errors", **doubled)[120] == 5.0 * 2**29


def test_filling_a_long_time_is_refused() -> None:
    """Filling a long time range is refused, because it would keep the proxy busy."""
    with pytest.raises(RequestInvalid, match="at most 10000 points"):
        MetricMath({"e": "FILL(calls, 0)"}, METRICS, 0, 1e9).find("e")
