"""A worker of the shared fleet dies between two questions of boto3, and an instance during an answer on the chat page.

The last test leaves the fleet with one instance, so these run last.
"""

import json
import os
import re
import signal

import pytest
import requests
from playwright.sync_api import Browser, Route, expect

from tests.browser import give_files
from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_chat_page import STREAM, ask, open_chat, picture
from tests.torchserve.test_failover import QUESTION
from tests.torchserve.test_faults import (
    ask_until_answered,
    find_jvm,
    ready_instances,
    slowed_worker,
    wait_until_all_serve,
    worker_pids,
)
from tests.torchserve.test_sessions import Chat, open_session
from tests.waiting import wait_until
from torchmoor.config.limits import LimitSettings

pytestmark = [pytest.mark.torchserve, pytest.mark.ends_fleet]


def order(fleet: Fleet, verb: str, name: str, state: str) -> None:
    """Drain or resume an instance, and wait for its new state."""
    requests.post(f"{fleet.admin}/instances/{name}/{verb}", timeout=10).raise_for_status()
    wait_until(lambda: [i["state"] for i in fleet.instances() if i["name"] == name] == [state], f"{name} {state}")


def open_at(fleet: Fleet, name: str, other: str) -> Chat:
    """Open a session about a red circle on an instance, while the other one takes none."""
    order(fleet, "drain", other, "draining")
    chat = open_session(fleet.client(), image=data_url(draw("circle", "red")))
    order(fleet, "resume", other, "ready")
    return chat


def test_sessions_survive_the_death_of_their_worker(fleet: Fleet) -> None:
    """After kill -9 of a worker, its session continues on another instance under the same id and with its history.

    The worker restarts under its name and serves the session again.
    """
    victim, survivor = sorted(ready_instances(fleet))
    client = fleet.client()
    chats = open_at(fleet, victim, survivor), open_at(fleet, survivor, victim)
    wait_until(lambda: len(fleet.settled()) == 2, "both instances get all turns of their sessions")
    assert [fleet.holders(chat.id) for chat in chats] == [[victim], [survivor]]
    chats[0].ask(QUESTION)

    for pid in worker_pids(fleet.run_dir, victim):
        os.kill(pid, signal.SIGKILL)

    assert "red" in chats[1].ask(QUESTION)
    assert "red" in ask_until_answered(chats[0], QUESTION)
    open_session(client, image=data_url(draw("square", "blue"))).close()
    wait_until_all_serve(fleet)
    assert "red" in ask_until_answered(chats[0], QUESTION)
    again = open_session(client, image=data_url(draw("square", "blue")))
    assert "blue" in again.ask("What color is the square?")


def lengthen_for_good(route: Route) -> None:
    """Make the answer long, and the request too long for continuation at another instance."""
    endless = {"temperature": 1e6, "seed": 11, "max_new_tokens": 1500}
    body = {**json.loads(route.request.post_data or ""), "parameters": endless}
    route.continue_(post_data=json.dumps(body) + " " * LimitSettings().max_continued_bytes)


@pytest.mark.browser
def test_conversations_go_on_while_their_instance_is_killed(fleet: Fleet, browser: Browser) -> None:
    """The page recovers from a killed instance, and waits for one where there is none.

    After kill -9 during an answer it shows the error and a button that repeats the question; between two questions it
    only shows a notice. Both answers are right, on another instance.
    """
    with open_chat(browser, fleet) as tab:
        page = tab.page
        order(fleet, "drain", "llava-1", "draining")
        give_files(page, picture("red.png", draw("circle", "red")))
        expect(ask(page, "What color is the circle?").locator(".text")).to_have_text("The circle is red.")
        page.get_by_role("button", name="New session").click()
        give_files(page, picture("blue.png", draw("square", "blue")))
        expect(ask(page, "What color is the square?").locator(".text")).to_have_text("The square is blue.")
        order(fleet, "resume", "llava-1", "ready")

        page.locator(".switch", has_text="What color is the circle?").click()
        page.route(STREAM, lengthen_for_good)
        wait_until(lambda: "llava-0" in fleet.settled(), "llava-0 gets all turns of its sessions")
        with slowed_worker(fleet.run_dir, "llava-0"):
            broken = ask(page, "Describe the image.")
            expect(broken.locator(".text")).to_have_text(re.compile(r"\S+"))
            os.kill(find_jvm(fleet.run_dir, "llava-0"), signal.SIGKILL)
        expect(broken).to_contain_text("The instance was lost in the middle of the answer")
        tab.check_accessibility()
        page.unroute(STREAM)
        broken.get_by_role("button", name="Ask again").click()
        expect(broken.locator(".text")).to_have_text(re.compile(r"^The image shows a red circle.*\.$"))
        expect(broken).to_contain_text("The session moved from llava-0 to llava-1, and continued there.")

        page.locator(".switch", has_text="What color is the square?").click()
        moved = ask(page, "What shape is the blue object?")
        expect(moved.locator(".text")).to_have_text("The blue object is a square.")
        expect(moved).to_contain_text("The session moved from llava-0 to llava-1, and continued there.")
        expect(moved.locator(".receipt")).to_contain_text("the session's own instance is not available")
        expect(moved.locator(".receipt")).to_contain_text("from the journal")
        tab.check_accessibility()

        requests.post(f"{fleet.admin}/instances/llava-0/drain", timeout=60).raise_for_status()  # it is being restarted
        order(fleet, "drain", "llava-1", "draining")
        page.get_by_role("button", name="New session").click()
        give_files(page, picture("green.png", draw("circle", "green")))
        held = ask(page, "What color is the circle?")
        expect(held).to_contain_text(re.compile("No instance of the endpoint is ready.*Trying again in"))
        order(fleet, "resume", "llava-1", "ready")
        expect(held.locator(".text")).to_have_text("The circle is green.")
