"""Run a headless Chromium for tests: Debian's package, driven by Playwright without a browser of its own.

With TORCHMOOR_PICTURES=docs in the environment, the tests on TorchServe save the documentation's pictures again.

On a laptop without it, tests that need it are skipped; in CI, which installs it, they fail.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.tools import require

PICTURES = Path(__file__).parents[1] / "build" / "failed-pages"
PROGRAM = "chromium-headless-shell"  # a page costs a quarter of the processor time that it costs in a whole Chromium
TIMEOUT_MS = 60_000
DESKTOP = (1280, 900)
PHONE = (390, 844)


@contextmanager
def run_chromium() -> Iterator[Browser]:
    """Run at most for a module: while Playwright runs, this thread cannot run another event loop."""
    require(PROGRAM)
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which(PROGRAM))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tab:
    """A page and the problems that it reported."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def check_accessibility(self) -> None:
        """Fail with axe-core's findings, if there are any."""
        results = Axe().run(self.page)
        assert results.violations_count == 0, results.generate_report()

    def save_for_docs(self, name: str, first: str = "body", last: str = "body") -> None:
        """Save the page from one element to another as a picture of the documentation, if TORCHMOOR_PICTURES is set."""
        folder = os.environ.get("TORCHMOOR_PICTURES")
        if not folder:
            return
        self.page.evaluate("scrollTo(0, 0)")
        top, end = self.page.locator(first).first.bounding_box(), self.page.locator(last).first.bounding_box()
        y = max(0, top["y"] - 10)
        clip = {"x": 0, "y": y, "width": DESKTOP[0], "height": end["y"] + end["height"] + 10 - y}
        taken = self.page.screenshot(full_page=True, clip=clip)
        Image.open(BytesIO(taken)).convert("RGB").quantize(256).save(Path(folder) / name, optimize=True)


@contextmanager
def open_tab(
    browser: Browser,
    url: str,
    *,
    scheme: str = "light",
    size: tuple[int, int] = DESKTOP,
    token: str = "",
    refusals: tuple[str, ...] = (),
) -> Iterator[Tab]:
    """Open a tab with a new profile; fail at the end if the page logged an error or a warning to the console.

    If the block fails, a picture of the whole page is saved, and the error names its file.

    refusals: words, one of which occurs in Chromium's message about each request that this test expects to be refused.
    """
    width, height = size
    context = browser.new_context(
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": width, "height": height},
        has_touch=size[0] <= PHONE[0],
        http_credentials={"username": "any", "password": token} if token else None,
    )
    context.set_default_timeout(TIMEOUT_MS)
    tab = Tab(context.new_page())

    def on_console(message: ConsoleMessage) -> None:
        is_refusal = message.text.startswith("Failed to load resource") and any(
            each in message.text for each in refusals
        )
        if message.type in ("error", "warning") and not is_refusal:
            tab.complaints.append(message.text)

    tab.page.on("console", on_console)
    tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    try:
        tab.page.goto(url)
        yield tab
    except Exception as error:
        picture = PICTURES / f"{secrets.token_hex(4)}.png"
        tab.page.screenshot(path=picture, full_page=True)
        error.add_note(f"the page: {picture}")
        raise
    finally:
        context.close()
    if tab.complaints:
        pytest.fail(f"the page complained: {tab.complaints}")


def wait_ready(page: Page) -> None:
    """Wait until the chat page knows its endpoints; before, it is inert, which Playwright does not see."""
    expect(page.locator("#frame[inert]")).to_have_count(0)


def give_files(page: Page, files: Any) -> None:
    """Give files to the chat page once it is ready."""
    wait_ready(page)
    page.set_input_files("#file", files)


def submit_question(page: Page) -> None:
    """Press Enter on the chat page once it is idle: while a turn runs, the page ignores Enter and shows Stop, not Ask.

    An answer's text can be complete before the page has read the end of the stream.
    """
    expect(page.locator("#ask")).to_be_visible()
    page.keyboard.press("Enter")
