"""Benchmark output is read by people and by programs, and drawn as charts."""

import argparse
import json
import platform
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from benchmarks import plot, report

ROWS = [{"arm": "alone", "ms": 12.5, "tokens": None}, {"arm": "ours", "ms": 3.0, "tokens": 8}]


def test_report_is_a_table_and_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A benchmark prints aligned rows, its ratios, and a last line of JSON with all of it."""
    options = argparse.Namespace(quick=False, rounds=5, save=False)

    report.print_report("example", ROWS, {"ours_vs_alone": 0.24, "ours_vs_peer": None}, options, streams=8)

    *table, last = capsys.readouterr().out.splitlines()
    assert table[:3] == ["  arm      ms  tokens", "alone  12.500       -", " ours   3.000       8"]
    assert table[3:] == ["ours_vs_alone = 0.240", "ours_vs_peer = -"]
    found = json.loads(last)
    assert {"benchmark", "rows", "ratios", "date", "commit", "machine", "versions", "settings"} == set(found)
    assert (found["benchmark"], found["rows"]) == ("example", ROWS)
    assert found["settings"] == {"quick": False, "rounds": 5, "streams": 8}
    assert found["ratios"] == {"ours_vs_alone": 0.24, "ours_vs_peer": None}


def test_kept_result_is_the_last_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """--save keeps exactly the printed result for docs/benchmarks.md."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)

    report.print_report("example", ROWS, {}, argparse.Namespace(quick=False, save=True))

    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == json.loads((tmp_path / "example.json").read_text())


@pytest.mark.parametrize(("arguments", "rounds"), [([], 5), (["--quick"], 1), (["--rounds", "3"], 3)])
def test_quick_run_has_one_round(monkeypatch: pytest.MonkeyPatch, arguments: list[str], rounds: int) -> None:
    """A whole run takes the medians of five rounds, a quick run one round, unless an option says otherwise."""
    monkeypatch.setattr("sys.argv", ["example.py", *arguments])

    assert rounds == report.parse_options("Example.", quick="less").rounds


def test_benchmark_without_rounds_has_no_such_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option that would have no effect is refused."""
    monkeypatch.setattr("sys.argv", ["example.py", "--rounds", "3"])

    with pytest.raises(SystemExit):
        report.parse_options("Example.", quick="less", rounds=None)

    assert "unrecognized arguments: --rounds" in capsys.readouterr().err


def test_every_benchmark_uses_the_rounds_that_it_offers() -> None:
    """--rounds has an effect wherever it is accepted."""
    texts = {path.name: path.read_text() for path in (report.ROOT / "benchmarks").glob("*.py")}
    offering = {name for name, text in texts.items() if "= parse_options(" in text and "rounds=None" not in text}

    assert {name for name in offering if "options.rounds" not in texts[name]} == set()


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--quick", "--save"]])
def test_options_that_make_no_sense_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """Zero rounds, and saving a quick run, are refused."""
    monkeypatch.setattr("sys.argv", ["example.py", *arguments])

    with pytest.raises(SystemExit):
        report.parse_options("Example.", quick="less")

    assert arguments[-1] in capsys.readouterr().err


def test_interpreter_is_named_with_its_build(tmp_path: Path) -> None:
    """Debian's Python has PGO and LTO, although the arguments of its configure do not say so."""
    python = tmp_path / "python"
    python.touch(mode=0o755)

    def describe(shown: str) -> str:
        python.write_text(f'#!/bin/sh\necho "{shown}"\n')
        return report.describe_python(str(python))

    assert describe("3.11.7 False '--prefix=/opt' '--enable-shared'") == "3.11.7, without PGO"
    assert describe("3.12.1 False '--enable-optimizations'") == "3.12.1, with PGO"
    assert describe("3.13.0 False '--enable-optimizations' '--with-lto'") == "3.13.0, with PGO and LTO"
    assert describe("3.11.2 True '--prefix=/usr'") == "3.11.2, with PGO and LTO (Debian)"
    assert report.describe_python(sys.executable).startswith(f"{platform.python_version()}, with")


def test_chart_shows_every_arm_and_goal() -> None:
    """A chart is well-formed SVG with a bar and a figure for each arm, and a mark for each goal."""
    bars = [
        plot.Bar("alone & slow", 12.5, 12.0, 13.0, False, "12.5 ms"),
        plot.Bar("ours", 3.0, 2.5, 3.5, True, "3.0 ms", goal=3.4),
    ]

    drawn = plot.draw(plot.Chart("Time", "one thread", bars))

    texts = [element.text for element in xml.etree.ElementTree.fromstring(drawn).iter() if element.text]
    assert {"Time", "one thread", "alone & slow", "ours", "12.5 ms", "3.0 ms"} <= set(texts)
    marks = drawn.count('class="goal"')
    assert marks == 2  # of the goal and the legend


def test_chart_of_follow_ups_shows_our_arms_with_their_goals() -> None:
    """Every arm of torchmoor has its colour and its goal; what is compared with them has neither."""
    bars = plot.followup(json.loads((plot.RESULTS / "followup.json").read_text())).bars

    baselines = {"stateless", "stateless, in process", "pixels, in process"}
    assert {bar.label for bar in bars if not bar.is_ours} == baselines
    assert {bar.label for bar in bars if bar.goal is None} == baselines


def test_kept_charts_are_drawn_from_the_kept_results() -> None:
    kept = {path.stem: json.loads(path.read_text()) for path in plot.RESULTS.glob("*.json")}

    drawn = {name: plot.draw(plot.CHARTS[name](kept[name])) for name in plot.CHARTS if name in kept}

    assert drawn
    assert drawn == {name: (plot.RESULTS / f"{name}.svg").read_text() for name in drawn}
