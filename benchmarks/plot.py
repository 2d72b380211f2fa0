"""Draws docs/benchmarks/NAME.svg from the saved result NAME.json in the same folder.

    python -m benchmarks.plot [engine followup]      default: every benchmark with a saved result

Each arm is a bar of its median, with a thin line from minimum to maximum and a mark at its goal. The code writes SVG
without a library (docs/decisions/0030-own-report.md), so the file changes only with the figures.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from textwrap import wrap
from typing import Any

from benchmarks.goals import most
from benchmarks.report import RESULTS

# Classes set the colours, so that a chart follows light and dark mode, alone and within a page.
STYLE = """
.plot { font-family: system-ui, sans-serif; fill: #1f2933; stroke: none }
.plot .paper { fill: #ffffff } .plot .note { fill: #52606d }
.plot .ours { fill: #2563a8 } .plot .baseline { fill: #9aa5b1 }
.plot .goal { stroke: #c2410c; stroke-width: 3 } .plot .spread { stroke: #1f2933 }
@media (prefers-color-scheme: dark) {
.plot { fill: #e4e7eb }
.plot .paper { fill: #16191d } .plot .note { fill: #a7b1bc }
.plot .ours { fill: #6ea8e8 } .plot .baseline { fill: #616e7c }
.plot .goal { stroke: #fb923c } .plot .spread { stroke: #e4e7eb }
}
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of a chart in SVG units. label_width: 0 puts a bar's label and value above it."""

    width: int
    label_width: int
    value_width: int
    bar_height: int
    title_size: int


WIDE = Layout(width=890, label_width=280, value_width=190, bar_height=24, title_size=16)
NARROW = Layout(width=380, label_width=0, value_width=24, bar_height=46, title_size=15)  # for a phone


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. goal: upper limit, or None; text: the value's label."""

    label: str
    value: float
    least: float
    most: float
    is_ours: bool
    text: str
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    subtitle: str
    bars: Sequence[Bar]


def draw(chart: Chart, layout: Layout = WIDE, style: str = STYLE) -> str:
    """Draw the chart as SVG. style: empty if the surrounding page contains STYLE."""
    longest = max(max(bar.most, bar.goal or 0.0) for bar in chart.bars)
    texts = [bar.text for bar in chart.bars] if layout.label_width else []  # beside their bars, else above them
    values_width = max([layout.value_width, *(9 + 7.5 * len(text) for text in texts)])
    scale = (layout.width - layout.label_width - values_width) / longest
    title = _lines(chart.title, layout, 9.0)
    subtitle = _lines(chart.subtitle, layout, 7.5)
    under = 24 + 20 * len(title)
    top = under + 18 * len(subtitle)
    legend = top + layout.bar_height * len(chart.bars) + 20
    entries = _legend(layout, legend)
    height = legend + 14 + (22 * 3 if layout.label_width == 0 else 0)
    lines = [
        f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" width="{layout.width}" height="{height}" '
        f'viewBox="0 0 {layout.width} {height}" font-size="13" role="img" aria-label="{escape(chart.title)}">',
        *([f"<style>{style}</style>"] if style else []),
        f'<rect class="paper" width="{layout.width}" height="{height}"/>',
        *(_text(12, 24 + 20 * row, line, size=layout.title_size, weight="bold") for row, line in enumerate(title)),
        *(_text(12, under + 18 * row, line, kind="note") for row, line in enumerate(subtitle)),
    ]
    for row, bar in enumerate(chart.bars):
        lines += _bar(bar, top + row * layout.bar_height, scale, layout)
    return "\n".join([*lines, *entries, "</svg>"]) + "\n"


def _lines(text: str, layout: Layout, per_character: float) -> list[str]:
    """Wrap the text to the layout's width, given a character's average width."""
    return wrap(text, int((layout.width - 24) / per_character))


def _legend(layout: Layout, y: float) -> list[str]:
    """Draw the legend: one line in the wide layout, four lines in the narrow one."""
    if layout.label_width:
        places = [(12.0, y), (112.0, y), (206.0, y), (410.0, y)]
    else:
        places = [(12.0, y + 22 * number) for number in range(4)]
    (ours_x, ours_y), (base_x, base_y), (goal_x, goal_y), (spread_x, spread_y) = places
    return [
        f'<rect class="ours" x="{ours_x}" y="{ours_y - 10}" width="12" height="12"/>',
        _text(ours_x + 18, ours_y, "torchmoor"),
        f'<rect class="baseline" x="{base_x}" y="{base_y - 10}" width="12" height="12"/>',
        _text(base_x + 18, base_y, "baseline"),
        f'<line class="goal" x1="{goal_x + 2}" x2="{goal_x + 2}" y1="{goal_y - 12}" y2="{goal_y + 3}"/>',
        _text(goal_x + 10, goal_y, "goal: upper limit"),
        f'<line class="spread" x1="{spread_x}" x2="{spread_x + 24}" y1="{spread_y - 4}" y2="{spread_y - 4}"/>',
        _text(spread_x + 30, spread_y, "minimum to maximum of all rounds"),
    ]


def _bar(bar: Bar, y: float, scale: float, layout: Layout) -> list[str]:
    start, thickness = (layout.label_width, 19) if layout.label_width else (12, 17)
    if layout.label_width:
        label = _text(start - 8, y + 14, bar.label, anchor="end")
    else:
        label = _text(start, y + 14, bar.label)
        y += 20
    middle, end = y + thickness / 2, start + bar.value * scale
    lines = [
        label,
        f'<rect class="{"ours" if bar.is_ours else "baseline"}" x="{start}" y="{y:.1f}" '
        f'width="{bar.value * scale:.1f}" height="{thickness}"/>',
        f'<line class="spread" x1="{start + bar.least * scale:.1f}" x2="{start + bar.most * scale:.1f}" '
        f'y1="{middle:.1f}" y2="{middle:.1f}"/>',
    ]
    if bar.goal is not None:
        x = start + bar.goal * scale
        lines.append(f'<line class="goal" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 2:.1f}" y2="{y + thickness + 2:.1f}"/>')
        end = max(end, x)
    if layout.label_width:
        value = _text(max(end, start + bar.most * scale) + 6, middle + 4, bar.text)
    else:
        value = _text(layout.width - 12, y - 6, bar.text, anchor="end")
    return [*lines, value]


def _text(
    x: float, y: float, text: str, *, size: int = 13, weight: str = "normal", kind: str = "", anchor: str = "start"
) -> str:
    name = f' class="{kind}"' if kind else ""
    return (
        f'<text{name} x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def engine(result: dict[str, Any]) -> Chart:
    """Chart processor time per token; goals are fractions of the sequential arm's time."""
    rows = {(row["arm"], row["dtype"], row["streams"]): row for row in result["rows"]}
    alone = rows["sequential", "float32", 1]["median"]
    goals = {
        ("torchmoor", "float32", count): alone * most("engine", f"cpu_token_{count}_vs_sequential") for count in (8, 16)
    }
    if ("vllm", "bfloat16", 8) in rows:
        goals["torchmoor", "bfloat16", 8] = rows["vllm", "bfloat16", 8]["median"]
    if ("vllm follow-up", "bfloat16", 8) in rows:
        goals["torchmoor follow-up", "bfloat16", 8] = rows["vllm follow-up", "bfloat16", 8]["median"]
    order = {"float32": 0, "bfloat16": 1}
    tokens = [key for key, row in rows.items() if row["unit"] == "CPU ms a token" and not key[0].startswith("added")]
    arms = list(dict.fromkeys(arm for arm, _, _ in tokens))
    bars = [
        Bar(
            f"{arm}, {count} at once, {dtype}" if count > 1 else f"{arm}, {dtype}",
            row["median"],
            row["least"],
            row["most"],
            arm.startswith(("torchmoor", "served")),
            f"{row['median']:.1f} ms",
            goals.get((arm, dtype, count)),
        )
        for arm, dtype, count in sorted(tokens, key=lambda key: (order[key[1]], arms.index(key[0]), key[2]))
        for row in [rows[arm, dtype, count]]
    ]
    settings = result["settings"]
    subtitle = (
        f"{settings['model']}, one thread, {settings['prompt_tokens']} prompt and {settings['new_tokens']} new tokens; "
        f"median of {settings['rounds']} rounds, {result['date']}"
    )
    return Chart("Processor time per generated token", subtitle, bars)


def followup(result: dict[str, Any]) -> Chart:
    """Chart time to first token; goals are fractions of the stateless arm's time."""
    rows = {row["arm"]: row for row in result["rows"]}
    stateless = rows["stateless"]["ttft_ms"]
    goals = {
        arm: stateless * most("followup", ratio)
        for arm, ratio in {
            "kv": "ttft_kv_vs_stateless",
            "responses": "ttft_responses_vs_stateless",
            "features": "ttft_features_vs_stateless",
            "rebuild": "rebuild_vs_stateless",
            "stored kv": "rebuild_stored_vs_stateless",
        }.items()
    }
    bars = [
        Bar(
            arm,
            row["ttft_ms"],
            row["least"],
            row["most"],
            arm in goals,
            f"{row['ttft_ms']:,.0f} ms" + (f", {row['ttft_ms'] / stateless:.3f} x stateless" if arm in goals else ""),
            goals.get(arm),
        )
        for arm, row in sorted(rows.items(), key=lambda item: item[1]["ttft_ms"])
    ]
    settings = result["settings"]
    subtitle = (
        f"second question about an image, {settings['parameters'] / 1e6:,.0f} M parameters, one thread; "
        f"median of {settings['rounds']} rounds, {result['date']}"
    )
    return Chart("Time to first token of a follow-up question", subtitle, bars)


def routing(result: dict[str, Any]) -> Chart:
    """Chart P99 of the published table over real HTTP; the mark is the simulated P99 of one central queue."""
    rows = {(row["users/instances"], row["arm"]): row for row in result["rows"]}
    bars = []
    for users in ("20/5", "40/10", "60/15", "80/20"):
        random = rows[users, "random"]["p99_ms"]
        best = random * (1 - rows[users, "simulated central_queue"]["p99_cut"])
        for arm in ("random", "least_outstanding", "late_binding"):
            row = rows[users, arm]
            is_ours = arm != "random"
            bars.append(
                Bar(
                    f"{users} {arm.replace('_', ' ')}",
                    row["p99_ms"],
                    random * (1 - row["most"]),
                    random * (1 - row["least"]),
                    is_ours,
                    f"{row['p99_ms']:,.0f} ms" + (f", {-row['p99_cut']:+.0%}" if is_ours else ""),
                    best if is_ours else None,
                )
            )
    settings = result["settings"]
    subtitle = (
        "users/instances in a closed loop, 100 ms per request, one at a time per instance; "
        f"{settings['rounds']} rounds of {settings['duration_s']:.0f} s, {result['date']}"
    )
    return Chart("P99 latency over real HTTP; the mark is one central queue, simulated", subtitle, bars)


def proxy(result: dict[str, Any]) -> Chart:
    """Chart processor time per request of each proxy; the goal is a multiple of the peers' time in the same run."""
    rows = {row["arm"]: row for row in result["rows"] if row["request_us"] is not None}
    goal = min(
        rows[peer]["request_us"] * most("proxy", f"cpu_vs_{peer.replace('-', '_')}")
        for peer in ("nginx", "vllm-router", "sglang-router")
        if peer in rows
    )
    bars = [
        Bar(
            arm,
            row["request_us"],
            row["least_us"],
            row["most_us"],
            arm == "torchmoor",
            f"{row['request_us']:.0f} us" + (f", {row['per_s']:,.0f}/s" if row["per_s"] is not None else ""),
            goal if arm == "torchmoor" else None,
        )
        for arm, row in sorted(rows.items(), key=lambda item: item[1]["request_us"])
    ]
    settings = result["settings"]
    subtitle = (
        f"1 KB POST of a session, {settings['connections']} connections, {settings['backends']} backends, one thread "
        f"of each proxy; median of {settings['rounds']} rounds, {result['date']}"
    )
    return Chart("Processor time per request", subtitle, bars)


FAULTS = {
    "kill": "SIGKILL of the JVM",
    "worker": "SIGKILL of the worker",
    "hang": "SIGSTOP of the JVM",
    "twice": "SIGKILL of two JVMs",
}


def failover(result: dict[str, Any]) -> Chart:
    """Chart how long the proxy keeps choosing a failed instance, and the slowest turn before and after."""
    limit, bars = most("failover", "detect_s"), []
    for fault, label in FAULTS.items():
        rows = [row for row in result["rows"] if row["fault"] == fault]
        if not rows:
            continue
        found = [row["detect_s"] for row in rows if row["detect_s"] is not None]
        if found:
            bars.append(_times(f"{label}: noticed", found, is_ours=True, goal=limit if fault == "kill" else None))
        for key, when in (("slowest_before_s", "before"), ("slowest_after_s", "after")):
            bars.append(_times(f"slowest turn {when}", [row[key] for row in rows], is_ours=when == "after"))
    settings = result["settings"]
    subtitle = (
        f"one of {settings['instances']} TorchServe instances fails under {settings['sessions']} conversations; "
        f"sessions lost {result['ratios']['sessions_lost']}, turns lost {result['ratios']['turns_lost']}; "
        f"{result['date']}"
    )
    return Chart("Time until a failed instance receives no more requests, and its effect on clients", subtitle, bars)


def _times(label: str, seconds: Sequence[float], *, is_ours: bool, goal: float | None = None) -> Bar:
    middle = median(seconds)
    return Bar(label, middle, min(seconds), max(seconds), is_ours, f"{middle:.2f} s", goal)


def many_models(result: dict[str, Any]) -> Chart:
    """Chart processor time per request, cold and warm, without the arm that unpacks an archive.

    Its bar would make all others too short to see.
    """
    rows = {row["arm"]: row for row in result["rows"] if row["arm"] not in ("cold, archive", "unload")}
    goals = {
        "many, in memory": rows["alone"]["cpu_ms"] * most("many_models", "warm_vs_alone"),
        "many, three in turn": rows["alone, three in turn"]["cpu_ms"] * most("many_models", "warm_vs_alone"),
        "cold, folder": rows["read and pass"]["cpu_ms"] * most("many_models", "cold_vs_read"),
    }
    bars = [
        Bar(arm, row["cpu_ms"], row["least"], row["most"], arm in goals, f"{row['cpu_ms']:.1f} ms", goals.get(arm))
        for arm, row in rows.items()
    ]
    subtitle = (
        f"MiniLM-L6, one thread, {result['ratios']['models']} models on a worker with memory for "
        f"{result['ratios']['resident']}; median of {result['settings']['rounds']} rounds, {result['date']}"
    )
    return Chart("Processor time of TorchServe and worker per request", subtitle, bars)


def soak(result: dict[str, Any]) -> Chart:
    """Chart the memory of each process at equal intervals of the run."""
    settings, bars = result["settings"], []
    for name, memory in settings["memory_mb"].items():
        for i in range(0, len(memory), 4):
            label = f"{name}, {100 * i // len(memory)} %"
            bars.append(Bar(label, memory[i], memory[i], memory[i], i > 0, f"{memory[i]} MB"))
    num_minutes = settings["rounds"] * settings["part_s"] * 4 / 60
    subtitle = (
        f"at 0 to 100 % of {num_minutes:.0f} minutes with hostile clients in half of the time; sessions lost "
        f"{result['ratios']['sessions_lost']}, turns lost {result['ratios']['turns_lost']}; {result['date']}"
    )
    return Chart("Memory of proxy, JVM and worker beside hostile clients", subtitle, bars)


CHARTS: dict[str, Callable[[dict[str, Any]], Chart]] = {
    "engine": engine,
    "failover": failover,
    "followup": followup,
    "many_models": many_models,
    "proxy": proxy,
    "routing": routing,
    "soak": soak,
}


def main() -> None:
    for name in sys.argv[1:] or [name for name in CHARTS if (RESULTS / f"{name}.json").is_file()]:
        if name in CHARTS:
            chart = CHARTS[name](json.loads((RESULTS / f"{name}.json").read_text()))
            (RESULTS / f"{name}.svg").write_text(draw(chart))


if __name__ == "__main__":
    main()
