"""scripts/make_grafana_dashboard.py and the file that it writes."""

import json

from scripts.make_grafana_dashboard import PAGE, render


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
