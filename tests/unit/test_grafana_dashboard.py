"""scripts/make_grafana_dashboard.py and the file that it writes; the metrics that the alerts name."""

import json
import re
from pathlib import Path

import yaml

from scripts.make_grafana_dashboard import PAGE, render

ROOT = Path(__file__).parents[2]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def test_alerts_name_metrics_that_exist() -> None:
    """An alert on a metric that nothing reports would never fire. docs/metrics.md lists all of them."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \|", page, re.MULTILINE)
    known = {f"{name.removesuffix('_total')}{end}" for name, kind in rows for end in SUFFIXES[kind]}
    known.add("InstanceScraped")  # of the page itself
    alerts = yaml.safe_load((ROOT / "deploy" / "observability" / "alerts.yml").read_text())

    expressions = " ".join(rule["expr"] for group in alerts["groups"] for rule in group["rules"])
    named = set(re.findall(r"\b(?:[A-Z]\w+|torchmoor_\w+)\b(?=[\[{ )])", re.sub(r'"[^"]*"', "", expressions)))

    assert len(named) > 10
    assert named <= known, named - known


def test_the_file_is_as_the_script_writes_it() -> None:
    assert PAGE.read_text() == render(), "run: python scripts/make_grafana_dashboard.py"


def test_panels_have_places_of_their_own() -> None:
    """Each panel lies inside the 24 columns, and no two overlap."""
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(render())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells
