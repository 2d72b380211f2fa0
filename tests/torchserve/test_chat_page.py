"""The chat page in a real browser with real instances."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import requests
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.browser import PHONE, Tab, give_files, open_tab, submit_question
from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import draw, encoded
from tests.torchserve.test_faults import slowed_worker
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.browser]
STREAM = "**/invocations-response-stream"
TTL_S = 3600  # handler.session.ttl_s
REFUSALS = ("503", "400", "424")  # the responses that tests force on the server
WATCH = """
() => {
  window.seen = [];
  new MutationObserver(() => seen.push([...document.querySelectorAll(".text")].at(-1)?.textContent))
    .observe(document.querySelector("#log"), { subtree: true, childList: true, characterData: true });
}
"""


@contextmanager
def open_chat(browser: Browser, fleet: Fleet) -> Iterator[Tab]:
    with open_tab(browser, fleet.runtime, refusals=REFUSALS) as opened:
        expect(opened.page.locator("#frame[inert]")).to_have_count(0)
        yield opened


@pytest.fixture
def tab(fleet: Fleet, browser: Browser) -> Iterator[Tab]:
    with open_chat(browser, fleet) as opened:
        yield opened


def picture(name: str, data: bytes) -> dict[str, Any]:
    """Return an image in Playwright's form of a file."""
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
    endless = {"temperature": 1e6, "seed": 11, "max_new_tokens": 1500}
    body = {**json.loads(route.request.post_data or ""), "parameters": endless}
    route.continue_(post_data=json.dumps(body))


def test_two_sessions_two_images_and_streams_that_grow(tab: Tab) -> None:
    """Two sessions with images stream right answers token by token.

    The test follows a user from the first sample to a second image in another session. The second question computes a
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
    give_files(page, picture("star.png", draw("triangle", "green")))
    expect(ask(page, "What shape is this?").locator(".text")).to_have_text("It is a triangle.")
    give_files(page, picture("wide.png", encoded(Image.new("RGB", (1600, 8), "red"))))
    page.get_by_role("textbox", name="Your question").fill("What color is the circle?")
    submit_question(page)
    expect(page.locator("#composer-notice")).to_contain_text("The pictures were refused")
    page.get_by_role("button", name="Remove wide.png").click()
    give_files(page, picture("circle.png", draw("circle", "red")))
    submit_question(page)
    expect(turns.last.locator(".text")).to_have_text("The circle is red.")

    page.locator(".switch", has_text="What color is the circle?").last.click()
    expect(turns).to_have_count(3)
    page.mouse.move(0, 0)
    tab.save_for_docs("chat.png")


def test_a_stopped_answer_stays_in_the_conversation(fleet: Fleet, tab: Tab) -> None:
    """The instance records the part of the answer that the page shows; a branch continues from before it."""
    page, sessions = tab.page, []
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.on("request", lambda request: sessions.append(request.headers.get("x-amzn-sagemaker-session-id")))
    page.get_by_role("button", name="Take a yellow star").click()
    page.get_by_role("button", name="What is this?").click()
    expect(page.locator(".turn .text")).to_have_text("It is a yellow star.")
    home = page.locator(".receipt dd").first.inner_text()
    page.route(STREAM, lengthen)
    with slowed_worker(fleet.run_dir, home):
        turn = ask(page, "Describe the image.")
        expect(turn.locator(".text")).to_have_text(re.compile(r"\S+"))
        page.keyboard.press("Escape")

        expect(turn).to_contain_text("Stopped. The conversation has the part of the answer that is shown.")
    page.unroute(STREAM)
    wait_until(lambda: fleet.status(home)["turns"]["running"] == 0, "the end of the turn")
    turn.get_by_role("button", name="Copy", exact=True).click()
    expect(page.locator("#announcer")).to_contain_text("Copied.")
    shown = page.evaluate("navigator.clipboard.readText()")
    talk = ["What is this?", "It is a yellow star.", "Describe the image.", shown, "What color is the background?"]
    session = next(each for each in reversed(sessions) if each and each != "NEW_SESSION")
    assert "are not this session's" in repeat(fleet, session, [*talk[:3], "Something else.", talk[4]]).text
    assert repeat(fleet, session, talk).ok

    turn.get_by_role("button", name="Edit the question").click()
    expect(page.locator(".turn")).to_have_count(1)
    branched = ask(page, "What color is the background?")
    expect(branched.locator(".text")).to_have_text("The background is black.")
    expect(branched.locator(".receipt")).to_contain_text("KV cache hit")
    page.locator(".switch").last.click()
    expect(page.locator(".turn")).to_have_count(2)


def repeat(fleet: Fleet, session: str, talk: list[str]) -> requests.Response:
    """Repeat the last question with a whole conversation, which the session refuses if it has another one."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(talk)]
    headers = {"X-Amzn-SageMaker-Session-Id": session}
    url = f"{fleet.runtime}/endpoints/llava/invocations"
    return requests.post(url, headers=headers, json={"messages": messages, "max_tokens": 8}, timeout=60)


def test_an_expired_session_is_opened_again_on_a_phone_in_the_dark(fleet: Fleet, browser: Browser) -> None:
    """The page warns before a session expires and reopens it, with its image, on one press."""
    with open_tab(browser, fleet.runtime, scheme="dark", size=PHONE, refusals=REFUSALS) as tab:
        page = tab.page
        page.clock.install()
        page.get_by_role("button", name="Take a yellow star").click()
        page.get_by_role("button", name="What is this?").click()
        expect(page.locator(".turn .text")).to_have_text("It is a yellow star.")
        page.clock.fast_forward(1000 * (TTL_S - 30))
        expect(page.locator("#expiry.soon")).to_contain_text(re.compile(r"This session expires in \d+ s\."))
        page.clock.fast_forward(30_000)
        expect(page.locator("#log > .notice.warn")).to_contain_text("This session has expired.")
        tab.check_accessibility()

        page.get_by_role("button", name="Open it again with the same pictures").click()
        expect(page.locator("#log > .notice")).to_contain_text("Opened again.")
        expect(ask(page, "Is there a circle?").locator(".text")).to_have_text("No, there is no circle.")
