"""Renders benchmark results as an HTML page: each ratio with its goal, charts, and the conditions of each run.

The page is one self-contained file: inline SVG, no scripts and no external resources. It is also well-formed XML, so
that a test can parse it strictly.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.goals import GOALS, Goal, Verdict, is_quick
from benchmarks.plot import CHARTS, NARROW, STYLE, WIDE, draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of one benchmark.

    summary: one sentence on what it does; command: runs it.
    report: its JSON report; None if the run failed for the reason `failure`.
    notes: lines about arms that were not measured.
    """

    name: str
    summary: str
    command: str
    report: Mapping[str, Any] | None
    failure: str = ""
    notes: Sequence[str] = ()


CSS = (
    """
:root { color-scheme: light dark; --text: #1f2933; --paper: #ffffff; --note: #52606d; --line: #d3d9df;
  --good: #14653a; --bad: #a1260d; --none: #52606d; --link: #1d4f8c }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7eb; --paper: #16191d; --note: #a7b1bc; --line: #3a424c;
  --good: #6fd39b; --bad: #ff9b7d; --none: #a7b1bc; --link: #8fbdf0 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--paper); margin: 0 auto;
  max-width: 60rem; padding: 1rem }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.25rem; margin: 2.5rem 0 0.25rem }
a { color: var(--link) } .note { color: var(--note); font-size: 0.9rem } .trouble { color: var(--bad) }
table { border-collapse: collapse; width: 100%; margin: 0.75rem 0; font-size: 0.95rem }
th, td { text-align: left; padding: 0.35rem 0.5rem; border-bottom: 1px solid var(--line); vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
code { font-size: 0.85em; overflow-wrap: anywhere } td code { display: block; max-width: 30rem; color: var(--note) }
.verdict { white-space: nowrap; font-weight: 600 }
.reached { color: var(--good) } .missed { color: var(--bad) } .not-run { color: var(--none) }
svg.plot { max-width: 100%; height: auto } .narrow { display: none }
@media (max-width: 44rem) { .wide { display: none } .narrow { display: block }
  th, td { padding: 0.35rem 0.25rem } .verdict { white-space: normal } }
"""
    + STYLE
)
KINDS = {
    Verdict.REACHED: ("reached", "\N{CHECK MARK}"),
    Verdict.MISSED: ("missed", "\N{MULTIPLICATION X}"),
    Verdict.NOT_RUN: ("not-run", "\N{EN DASH}"),
}


def render(results: Sequence[Result]) -> str:
    """Render the page."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>torchmoor: benchmarks against their goals</title>
<link rel="icon" href="data:,"/>
<style>{CSS}</style>
</head>
<body>
<header>
<h1>torchmoor: benchmarks against their goals</h1>
{_summary(results)}
</header>
<main>
{"".join(_section(result) for result in results)}</main>
</body>
</html>
"""


def judge(results: Sequence[Result]) -> dict[Goal, Verdict]:
    """Judge every goal, including those of benchmarks without a result."""
    reports = {result.name: result.report for result in results}
    return {goal: goal.judge(reports.get(goal.benchmark)) for goal in GOALS}


def _summary(results: Sequence[Result]) -> str:
    verdicts = judge(results)
    counts = Counter(verdicts.values())
    totals = ", ".join(
        f'<span class="{KINDS[each][0]}">{counts[each]}\N{NO-BREAK SPACE}{each.value}</span>' for each in Verdict
    )
    lines = [
        f"<p>{len(verdicts)} goals: {totals}.</p>",
        '<p class="note">Every figure is a ratio within one run, because machines differ; docs/benchmarks.md '
        "explains each ratio.</p>",
    ]
    quick = [result.name for result in results if result.report is not None and is_quick(result.report)]
    if quick:
        lines.append(
            f'<p class="note">Shortened runs, of one round each: {", ".join(quick)}. They show that each benchmark '
            "works; only a whole run gives reliable verdicts.</p>"
        )
    links = [
        f'<li><a href="#{result.name}">{result.name}</a>: {_standing(result, verdicts)}</li>' for result in results
    ]
    links += [f"<li>{name}: not run</li>" for name in _without_result(results)]
    return "\n".join([*lines, '<nav aria-label="Benchmarks"><ul>', *links, "</ul></nav>"])


def _without_result(results: Sequence[Result]) -> list[str]:
    names = {result.name for result in results}
    return [name for name in dict.fromkeys(goal.benchmark for goal in GOALS) if name not in names]


def _standing(result: Result, verdicts: Mapping[Goal, Verdict]) -> str:
    if result.report is None:
        return '<span class="trouble">no result</span>'
    own = [verdict for goal, verdict in verdicts.items() if goal.benchmark == result.name]
    if not own:
        return "no goals"
    missing = own.count(Verdict.NOT_RUN)
    standing = f"{own.count(Verdict.REACHED)} of {len(own)} goals reached"
    return standing + (f", {missing} not run" if missing else "")


def _section(result: Result) -> str:
    parts = [f"<h2>{result.name}</h2>", f"<p>{escape(result.summary)}</p>"]
    if result.report is None:
        parts.append(f'<p class="trouble">No result: {escape(result.failure)}</p>')
    else:
        parts.append(_charts(result.report))
    parts.append(_goals(result))
    if result.report is not None:
        parts.append(_others(result.report))
    parts += [f'<p class="note">{escape(note)}</p>' for note in result.notes]
    parts.append(_about(result))
    return f'<section id="{result.name}">\n' + "\n".join(part for part in parts if part) + "\n</section>\n"


def _charts(report: Mapping[str, Any]) -> str:
    """Draw the chart for a wide and for a narrow window; the page shows one of them."""
    make = CHARTS.get(report["benchmark"])
    if make is None:
        return ""
    try:
        chart = make(dict(report))
    except KeyError as error:
        return f'<p class="note">No chart: this run lacks {escape(str(error))}.</p>'
    return "\n".join(
        f'<div class="{name}">{draw(chart, layout, style="")}</div>'
        for name, layout in (("wide", WIDE), ("narrow", NARROW))
    )


def _goals(result: Result) -> str:
    goals = [goal for goal in GOALS if goal.benchmark == result.name]
    if not goals:
        return '<p class="note">This benchmark has no goals.</p>'
    rows = [
        f'<tr data-ratio="{goal.ratio}"><td>{escape(goal.means)} <code>{goal.ratio}</code></td>'
        f'<td class="number">{_value(result.report, goal.ratio)}</td><td class="number">{escape(goal.limit)}</td>'
        f"{_verdict(goal.judge(result.report))}</tr>"
        for goal in goals
    ]
    return "\n".join(
        [
            "<table>",
            '<thead><tr><th scope="col">what</th><th scope="col" class="number">measured</th>'
            '<th scope="col" class="number">goal</th><th scope="col">verdict</th></tr></thead>',
            "<tbody>",
            *rows,
            "</tbody>",
            "</table>",
        ]
    )


def _verdict(verdict: Verdict) -> str:
    name, sign = KINDS[verdict]
    return f'<td class="verdict {name}"><span aria-hidden="true">{sign}</span> {verdict.value}</td>'


def _others(report: Mapping[str, Any]) -> str:
    """Render the ratios without a goal."""
    with_goal = {goal.ratio for goal in GOALS if goal.benchmark == report["benchmark"]}
    rows = [
        f'<tr data-ratio="{escape(name)}"><td><code>{escape(name)}</code></td>'
        f'<td class="number">{_value(report, name)}</td></tr>'
        for name in report["ratios"]
        if name not in with_goal
    ]
    if not rows:
        return ""
    head = '<thead><tr><th scope="col">ratio</th><th scope="col" class="number">measured</th></tr></thead>'
    return "\n".join(
        [
            f"<details><summary>{len(rows)} more figures, without a goal</summary>",
            f"<table>{head}",
            "<tbody>",
            *rows,
            "</tbody></table></details>",
        ]
    )


def _about(result: Result) -> str:
    parts = [f"<code>{escape(result.command)}</code>"]
    if result.report is not None:
        report = result.report
        versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
        parts += [
            f"{report['date']}, commit {report['commit']}",
            report["machine"],
            versions,
        ]
        parts[1:] = [escape(part) for part in parts[1:]]
    return f'<p class="note">{" · ".join(parts)}</p>'


def _value(report: Mapping[str, Any] | None, ratio: str) -> str:
    value = None if report is None else report["ratios"].get(ratio)
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
