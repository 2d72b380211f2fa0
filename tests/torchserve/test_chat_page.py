"""The chat page in a real browser with real instances, one of which is killed during a conversation.

With TORCHMOOR_PICTURES=docs in the environment, the documentation's picture is saved again.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.browser import PHONE, Tab, open_tab, run_chromium, submit_question
from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import draw
from tests.torchserve.test_failover import find_jvm
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.browser]
STREAM = "**/invocations-response-stream"
OPENING = "**/invocations"
REFUSALS = ("503", "400", "424")  # the responses that tests force on the server
WATCH = """
() => {
  window.seen = [];
  new MutationObserver(() => seen.push([...document.querySelectorAll(".text")].at(-1)?.textContent))
    .observe(document.querySelector("#log"), { subtree: true, childList: true, characterData: true });
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with run_chromium() as running:
        yield running


@pytest.fixture(scope="module")
def chat_fleet(fleet: Fleet) -> Iterator[Fleet]:
    """Use the shared fleet, and restore it after this module."""
    yield fleet
    for name in ("llava-0", "llava-1"):
        requests.post(f"{fleet.admin}/instances/{name}/resume", timeout=10)  # refused if it is not drained
    wait_until(
        lambda: all(i["state"] == "ready" and i["share"] == 1.0 for i in fleet.instances()),
        "the fleet is restored",
        deadline_s=240,
        interval_s=0.2,
    )


@pytest.fixture
def tab(chat_fleet: Fleet, browser: Browser) -> Iterator[Tab]:
    with open_tab(browser, chat_fleet.runtime, refusals=REFUSALS) as opened:
        expect(opened.page.locator("#frame[inert]")).to_have_count(0)
        yield opened


def picture(name: str, data: bytes) -> dict[str, Any]:
    """Return a picture in Playwright's form of a file."""
    return {"name": name, "mimeType": "image/png", "buffer": data}


def ask(page: Page, question: str) -> Locator:
    """Submit the question once the page is idle; return the new turn."""
    turns = page.locator(".turn").count()
    page.get_by_role("textbox", name="Your question").fill(question)
    submit_question(page)
    turn = page.locator(".turn").nth(turns)
    expect(turn).to_be_visible()
    return turn


def lengthen(route: Route) -> None:
    """Make the answer long: with this seed, 1,500 tokens pass before it ends."""
    endless = {"temperature": 1e6, "seed": 6, "max_new_tokens": 1500}
    body = {**json.loads(route.request.post_data or ""), "parameters": endless}
    route.continue_(post_data=json.dumps(body))


def shorten(route: Route) -> None:
    """Make the session expire soon."""
    body = json.loads(route.request.post_data or "")
    if body.get("requestType") == "NEW_SESSION":
        body["ttl_s"] = 15
    route.continue_(post_data=json.dumps(body))


def order(fleet: Fleet, verb: str, name: str, state: str) -> None:
    """Drain or resume an instance, and wait for its new state."""
    requests.post(f"{fleet.admin}/instances/{name}/{verb}", timeout=10).raise_for_status()
    wait_until(lambda: [i["state"] for i in fleet.instances() if i["name"] == name] == [state], f"{name} {state}")


def stream_at(name: str, fleet: Fleet, page: Page) -> Locator:
    """Start a long answer on its session's own instance; repeat if it ended by itself.

    An instance that has just resumed first gets only a share of its sessions' turns.
    """
    for _ in range(10):
        wait_until(lambda: all(i["state"] == "ready" and i["share"] == 1.0 for i in fleet.instances()), "all at work")
        turn = ask(page, "Describe the image.")
        expect(turn.locator(".text")).to_have_text(re.compile(r"\S+"))
        if fleet.status(name)["turns"]["running"]:
            return turn
        page.keyboard.press("Escape")
        expect(page.locator("#ask")).to_be_visible()
    pytest.fail(f"no answer from {name}")


def test_conversations_go_on_while_their_instance_is_killed(chat_fleet: Fleet, tab: Tab, tmp_path: Path) -> None:
    """The page waits out overload and recovers from killed instances.

    After kill -9 during an answer it shows the error and a button that repeats the question; between two questions it
    only shows a notice. Both answers are right, on another instance.
    """
    page, fleet = tab.page, chat_fleet
    for name in ("llava-0", "llava-1"):
        order(fleet, "drain", name, "draining")
    page.set_input_files("#file", picture("red.png", draw("circle", "red")))
    first = ask(page, "What color is the circle?")
    expect(first).to_contain_text(re.compile("No instance of the endpoint is ready.*Trying again in"))
    tab.save(tmp_path / "waiting.png")
    order(fleet, "resume", "llava-0", "ready")
    expect(first.locator(".text")).to_have_text("The circle is red.")
    page.get_by_role("button", name="New session").click()
    page.set_input_files("#file", picture("blue.png", draw("square", "blue")))
    expect(ask(page, "What color is the square?").locator(".text")).to_have_text("The square is blue.")
    order(fleet, "resume", "llava-1", "ready")

    page.locator(".switch", has_text="What color is the circle?").click()
    page.route(STREAM, lengthen)
    broken = stream_at("llava-0", fleet, page)
    run_dir = Path(fleet.process.args[fleet.process.args.index("--run-dir") + 1])  # type: ignore[index,union-attr]
    os.kill(find_jvm(run_dir, "llava-0"), signal.SIGKILL)
    expect(broken).to_contain_text("The instance was lost in the middle of the answer")
    tab.check_accessibility()
    tab.save(tmp_path / "lost.png")
    page.unroute(STREAM)
    broken.get_by_role("button", name="Ask again").click()
    expect(broken.locator(".text")).to_have_text(re.compile(r"^The image shows a red circle.*\.$"))
    expect(broken).to_contain_text("The session moved from llava-0 to llava-1, and went on there.")

    page.locator(".switch", has_text="What color is the square?").click()
    moved = ask(page, "What shape is the blue object?")
    expect(moved.locator(".text")).to_have_text("The blue object is a square.")
    expect(moved).to_contain_text("The session moved from llava-0 to llava-1, and went on there.")
    expect(moved.locator(".receipt")).to_contain_text("the session's own instance is away")
    expect(moved.locator(".receipt")).to_contain_text("from the journal")
    tab.check_accessibility()
    tab.save(tmp_path / "moved.png")


def test_two_sessions_two_pictures_and_streams_that_grow(tab: Tab, tmp_path: Path) -> None:
    """Two sessions with pictures stream right answers token by token.

    The test follows a user from the first sample to a second picture in another session. The second question computes a
    fraction of its context.
    """
    page = tab.page
    page.get_by_role("button", name="Take a red circle and a blue square").click()
    page.evaluate(WATCH)
    page.get_by_role("button", name="What color is the circle?").click()
    turns = page.locator(".turn")
    expect(turns.locator(".text")).to_have_text("The circle is red.")
    seen = sorted({text for text in page.evaluate("seen") if text}, key=len)
    assert len(seen) > 2
    assert all(text.startswith(before) for before, text in pairwise(seen))
    for question, answer in (
        ("Where is the blue square?", "The blue square is at the bottom right."),
        ("How many shapes are there?", "There are two objects."),
    ):
        expect(ask(page, question).locator(".text")).to_have_text(answer)
    receipt = turns.last.locator(".receipt")
    expect(receipt).to_contain_text(re.compile(r"Tokens computed\d{1,2} of \d{2,3} in context"))
    expect(receipt).to_contain_text("it holds this session")
    expect(receipt).to_contain_text("KV cache hit")

    page.get_by_role("button", name="New session").click()
    page.set_input_files("#file", picture("star.png", draw("triangle", "green")))
    expect(ask(page, "What shape is this?").locator(".text")).to_have_text("It is a triangle.")
    page.set_input_files("#file", picture("wide.png", encoded(Image.new("RGB", (1600, 8), "red"))))
    page.get_by_role("textbox", name="Your question").fill("What color is the circle?")
    submit_question(page)
    expect(page.locator("#composer-notice")).to_contain_text("The pictures were not taken")
    page.get_by_role("button", name="Remove wide.png").click()
    page.set_input_files("#file", picture("circle.png", draw("circle", "red")))
    submit_question(page)
    expect(turns.last.locator(".text")).to_have_text("The circle is red.")

    page.locator(".switch", has_text="What color is the circle?").last.click()
    expect(turns).to_have_count(3)
    if "TORCHMOOR_PICTURES" in os.environ:
        page.mouse.move(0, 0)
        page.screenshot(path=Path(os.environ["TORCHMOOR_PICTURES"]) / "chat.png")
    tab.save(tmp_path / "chat.png")


def test_a_stopped_answer_is_stopped_at_the_instance(chat_fleet: Fleet, tab: Tab) -> None:
    """Stopping an answer cancels its turn at the instance, and the session answers the next question."""
    page = tab.page
    page.get_by_role("button", name="Take a yellow star").click()
    page.get_by_role("button", name="What is this?").click()
    expect(page.locator(".turn .text")).to_have_text("It is a yellow star.")
    home = page.locator(".receipt dd").first.inner_text()
    page.route(STREAM, lengthen)
    turn = ask(page, "Describe the image.")
    expect(turn.locator(".text")).to_have_text(re.compile(r"\S+"))
    page.keyboard.press("Escape")

    expect(turn).to_contain_text("Stopped.")
    page.unroute(STREAM)
    wait_until(lambda: chat_fleet.status(home)["turns"]["running"] == 0, "the end of the turn")
    expect(ask(page, "What color is the background?").locator(".text")).to_have_text("The background is black.")


def test_an_expired_session_is_opened_again_on_a_phone_in_the_dark(
    chat_fleet: Fleet, browser: Browser, tmp_path: Path
) -> None:
    """The page warns before a session expires and reopens it, with its picture, on one press."""
    with open_tab(browser, chat_fleet.runtime, scheme="dark", size=PHONE, refusals=REFUSALS) as tab:
        page = tab.page
        page.route(OPENING, shorten)
        page.get_by_role("button", name="Take a yellow star").click()
        page.get_by_role("button", name="What is this?").click()
        expect(page.locator(".turn .text")).to_have_text("It is a yellow star.")
        expect(page.locator("#expiry.soon")).to_contain_text(re.compile(r"This session expires in \d+ s\."))
        expect(page.locator("#log > .notice.warn")).to_contain_text("This session has expired.")
        tab.check_accessibility()
        tab.save(tmp_path / "expired.png")
        page.unroute(OPENING)

        page.get_by_role("button", name="Open it again with the same pictures").click()
        expect(page.locator("#log > .notice")).to_contain_text("Opened again.")
        expect(ask(page, "Is there a circle?").locator(".text")).to_have_text("No, there is no circle.")
        tab.save(tmp_path / "phone.png")


def encoded(image: Image.Image) -> bytes:
    """Return a picture as PNG."""
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()
