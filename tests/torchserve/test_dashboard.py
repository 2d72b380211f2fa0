"""The dashboard in a real browser, before real instances: it is live, and its buttons do what they say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from playwright.sync_api import Browser, expect

from tests.browser import open_tab, run_chromium
from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_sessions import open_session
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.browser]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with run_chromium() as running:
        yield running


@pytest.fixture
def drained(fleet: Fleet) -> Iterator[str]:
    """The instance that a test drains; serving as before when the test is over."""
    name = "llava-1"
    yield name
    requests.post(f"{fleet.admin}/instances/{name}/resume", timeout=60)  # refused if the test has done it
    wait_until(
        lambda: all(i["state"] == "ready" and i["share"] == 1.0 for i in fleet.instances()), "the fleet as it was"
    )


def test_dashboard_follows_the_fleet_and_drains_an_instance(
    fleet: Fleet, browser: Browser, drained: str, tmp_path: Path
) -> None:
    """Sessions, memory, latencies and decisions move with what boto3 asks; drained and resumed by click."""
    with open_tab(browser, fleet.admin) as tab:
        page = tab.page
        expect(page.locator("#health")).to_have_text("2 of 2 instances ready")

        chat = open_session(fleet.client(), image=data_url(draw("circle", "red")))
        assert chat.ask("What color is the circle?")
        assert chat.stream("Where is it?")
        [home] = fleet.holders(chat.id)
        status = fleet.status(home)
        card = page.locator(".card", has=page.get_by_role("heading", name=home, exact=True))
        expect(card).to_contain_text(f"{status['sessions']['open']:,} of {status['sessions']['max']:,}")
        expect(card).to_contain_text(re.compile(r"KV cache \(device\)[\d.]+ [KMG]iB of"))
        expect(card).to_contain_text(f"Tokens generated{status['tokens']['generated']:,}")
        expect(page.get_by_role("img", name=re.compile("Answers by latency: .*[1-9]"))).to_be_visible()
        expect(page.get_by_role("img", name=re.compile("Streams by time to their first chunk"))).to_be_visible()
        expect(page.locator("article .label", has_text=re.compile("^session$"))).to_be_visible()

        page.get_by_role("button", name=f"Drain {drained}").click()
        page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
        expect(page.locator("#health")).to_have_text("1 of 2 instances ready")
        other = page.locator(".card", has=page.get_by_role("heading", name=drained, exact=True))
        expect(other.locator(".badge")).to_have_text("draining")
        assert [i["state"] for i in fleet.instances() if i["name"] == drained] == ["draining"]
        assert chat.ask("What color is the circle?")
        tab.check_accessibility()
        tab.save(tmp_path / "dashboard.png")

        page.get_by_role("button", name=f"Resume {drained}").click()
        page.get_by_role("dialog").get_by_role("button", name="Resume", exact=True).click()
        expect(page.locator("#health")).to_have_text("2 of 2 instances ready")
        expect(other.get_by_role("button", name=f"Drain {drained}")).to_be_visible()
    chat.close()
