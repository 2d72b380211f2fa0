"""`make report`: benchmark results against the goals, as an HTML page."""

import dataclasses
import json
import os
import signal
import threading
import xml.etree.ElementTree
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import pytest
from playwright.sync_api import Browser

from benchmarks import goals, report_all
from tests.browser import DESKTOP, PHONE, open_tab
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

KEPT = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"
# Goals that were added after the kept run, which has no figure for them.
WITHOUT_FIGURE = {
    ("async_inference", "wake_vs_start"),
    ("routing", "p99_gain_kept_2"),
    ("routing", "p99_gain_kept_4"),
}


def draw(monkeypatch: pytest.MonkeyPatch, page: Path, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["report_all.py", "--output", str(page), *arguments])
    report_all.main()
    return page.read_text(encoding="utf-8")


def read_strictly(text: str) -> Element:
    """Parse the page as XML, which requires closed elements, escaped characters and unique ids."""
    root = xml.etree.ElementTree.fromstring(text)
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    return root


def rows_of(root: Element) -> dict[tuple[str, str], list[str]]:
    """Return the cells of each ratio's row, by benchmark and ratio."""
    return {
        (section.attrib["id"], row.attrib["data-ratio"]): ["".join(cell.itertext()).strip() for cell in row]
        for section in root.iter("section")
        for row in section.iter("tr")
        if "data-ratio" in row.attrib
    }


def test_page_has_every_ratio_and_every_goal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page lists every ratio and every goal, with or without a result."""
    kept = {path.stem: json.loads(path.read_text()) for path in KEPT.glob("*.json")}

    rows = rows_of(read_strictly(draw(monkeypatch, tmp_path / "page.html", "--from", str(KEPT))))

    assert kept
    assert rows.keys() >= {(name, ratio) for name, report in kept.items() for ratio in report["ratios"]}
    wanted = {(goal.benchmark, goal.ratio): goal for goal in goals.GOALS}
    assert len(wanted) == len(goals.GOALS)
    assert rows.keys() >= wanted.keys()
    for (name, ratio), goal in wanted.items():
        *_, limit, verdict = rows[name, ratio]
        assert limit == goal.limit
        figure = kept.get(name, {"ratios": {}})["ratios"].get(ratio)
        assert ("not run" in verdict) is (figure is None), (name, ratio, verdict)
        assert figure is not None or name not in kept or (name, ratio) in WITHOUT_FIGURE, "a goal of another name?"


def test_page_says_how_each_figure_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page states the command, time, machine, versions and commit of each figure."""
    kept = json.loads((KEPT / "engine.json").read_text())

    root = read_strictly(draw(monkeypatch, tmp_path / "page.html", "--from", str(KEPT), "engine"))

    (section,) = root.iter("section")
    text = "".join(section.itertext())
    told = ("make bench NAME=engine", kept["date"], kept["commit"], kept["machine"], kept["versions"]["torch"])
    assert all(each in text for each in told)
    assert "vllm" in text.lower()
    assert [each for each in section.iter() if each.tag.endswith("svg")]


def just_beyond(goal: Any) -> list[Any]:
    """Return values that barely miss a goal."""
    if goal.wants is not None:
        return [not goal.wants]
    edges = [] if goal.most is None else [goal.most * (1 + 1e-9) + 1e-9]
    return edges + ([] if goal.least is None else [goal.least * (1 - 1e-9) - 1e-9])


def test_only_what_was_measured_and_is_within_its_goal_is_reached() -> None:
    """A goal is reached only by a measured value, the limit included; a missing run or figure does not reach it."""
    verdict = goals.Verdict
    for goal in goals.GOALS:
        edge = goal.wants if goal.wants is not None else goal.most if goal.most is not None else goal.least
        expected = [(edge, verdict.REACHED), (None, verdict.NOT_RUN)]
        expected += [(value, verdict.MISSED) for value in just_beyond(goal)]
        for value, judged in expected:
            assert goal.judge({"ratios": {goal.ratio: value}, "settings": {}}) is judged, (goal, value)
        assert goal.judge({"ratios": {}, "settings": {}}) is verdict.NOT_RUN
        assert goal.judge(None) is verdict.NOT_RUN


def test_quick_run_says_nothing_of_what_it_is_too_small_for() -> None:
    """A quick run of 300 requests neither reaches nor misses a goal about 10,000."""
    (goal,) = [each for each in goals.GOALS if each.ratio == "submitted"]
    report = {"ratios": {"submitted": 300}, "settings": {"quick": True}}

    assert goal.judge(report) is goals.Verdict.NOT_RUN
    assert dataclasses.replace(goal, needs_whole_run=False).judge(report) is goals.Verdict.MISSED


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "size"), [("light", DESKTOP), ("dark", DESKTOP), ("light", PHONE), ("dark", PHONE)])
def test_page_is_readable_everywhere(
    browser: Browser,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    scheme: str,
    size: tuple[int, int],
) -> None:
    """The page is accessible in light and dark mode, logs nothing to the console, and fits a phone."""
    page = tmp_path / "page.html"
    draw(monkeypatch, page, "--from", str(KEPT))

    with open_tab(browser, page.as_uri(), scheme=scheme, size=size) as tab:
        tab.check_accessibility()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= size[0]
        for plot in tab.page.locator("svg.plot:visible").all():
            edges = plot.evaluate(
                "svg => { const outer = svg.getBoundingClientRect();"
                " return [...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect())"
                ".filter(box => box.left < outer.left - 1 || box.right > outer.right + 1).length }"
            )
            assert edges == 0, plot.get_attribute("aria-label")
        assert tab.page.locator("svg.plot:visible").count() * 2 == tab.page.locator("svg.plot").count()


FINE = """
print("round 1 of 1")
about = {"date": "today", "commit": "c", "machine": "m", "versions": {"python": "3"}, "settings": {}}
print(json.dumps({"benchmark": "fine", "rows": [], "ratios": {"x": 0.5}, **about}))
"""
HANGS = """
from pathlib import Path
try:
    Path(__file__).with_name("started").write_text("")
    time.sleep(600)
finally:
    Path(__file__).with_name("tidied").touch()
"""


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Create other benchmarks: one that runs, one that lacks a tool, one that hangs, and a helper module."""
    codes = {"fine": FINE, "needs": "raise SystemExit('needs: install wrk first')", "hangs": HANGS}
    for name, code in codes.items():
        says = f'"""What is {name}? `make bench NAME={name}`"""\n'
        (tmp_path / f"{name}.py").write_text(f"{says}import json, time\n{code}\n")
    (tmp_path / "part.py").write_text('"""Not a benchmark."""\n')
    monkeypatch.setattr(report_all, "BENCHMARKS", tmp_path)
    assert report_all.known_benchmarks() == sorted(codes)
    return tmp_path


def test_no_result_at_all_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without results is an error instead of an empty page."""
    page = tmp_path / "page.html"

    with pytest.raises(SystemExit) as ended:
        draw(monkeypatch, page, "--from", str(tmp_path))

    assert ended.value.code == "there is no result at all"
    assert "no result of engine" in capsys.readouterr().err


def test_failing_benchmark_does_not_stop_the_others(
    others: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each benchmark runs, reports progress and keeps its result; one that lacks a tool is listed with its message."""
    page = others / "report" / "page.html"

    text = draw(monkeypatch, page, "needs", "fine")

    said = capsys.readouterr()
    assert said.out.strip() == str(page)
    assert "fine: 2 of 2" in said.err
    assert "  round 1 of 1" in said.err
    told = {section.attrib["id"]: "".join(section.itertext()) for section in read_strictly(text).iter("section")}
    assert told.keys() == {"fine", "needs"}
    assert "install wrk first" in told["needs"]
    assert "No result" not in told["fine"]
    assert "QUICK=1" in told["fine"]
    again = draw(monkeypatch, others / "again.html", "--from", str(page.parent))
    assert rows_of(read_strictly(again)) == rows_of(read_strictly(text)) == {("fine", "x"): ["x", "0.500"]}


def test_hanging_benchmark_is_stopped(others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that hangs ends at its time-out with what it has started, and the page says how to extend it."""
    signal_group = os.killpg

    def signal_started(group: int, number: int) -> None:
        wait_until((others / "started").exists, "the benchmark hangs")
        signal_group(group, number)

    monkeypatch.setattr(os, "killpg", signal_started)

    result = report_all.run("hangs", timeout_s=1.0)

    assert result.report is None
    assert "stopped after 1 s; --timeout-s gives it more" in result.failure
    assert (others / "tidied").exists()


def test_benchmark_is_stopped_with_the_report(others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM ends the report as Ctrl-C does: the benchmark that runs stops what it has started."""
    started = others / "started"
    os.mkfifo(started)

    def terminate() -> None:
        started.read_text()  # waits for the benchmark
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    with pytest.raises(SystemExit) as ended:
        draw(monkeypatch, others / "report" / "page.html", "hangs")

    assert ended.value.code == 143
    assert (others / "tidied").exists()


def test_other_file_is_no_result(others: Path) -> None:
    """A JSON file of another program in the folder of results is listed as that."""
    (others / "fine.json").write_text("[1]")

    [result] = report_all.read_results(others, ["fine"])

    assert result.failure == "fine.json is not a result of fine"
