"""The dashboard in a real browser with real instances: it updates live, and its buttons work."""

import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from botocore.exceptions import ClientError
from playwright.sync_api import Browser, Page, expect

from tests.browser import open_tab
from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_faults import find_jvm
from tests.torchserve.test_sessions import open_session
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.browser, pytest.mark.ends_fleet]


@pytest.fixture
def drained(fleet: Fleet) -> Iterator[str]:
    """Return the instance that a test drains, and resume it afterwards."""
    yield "llava-1"
    for instance in fleet.instances():  # refused if the test has done it
        requests.post(f"{fleet.admin}/instances/{instance['name']}/resume", timeout=60)
    wait_until(lambda: all(i["state"] == "ready" for i in fleet.instances()), "no instance is drained")


def test_dashboard_follows_the_fleet_and_drains_an_instance(fleet: Fleet, browser: Browser, drained: str) -> None:
    """Sessions, memory, latencies and decisions follow boto3's requests; buttons drain and resume an instance."""
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
        expect(card).to_contain_text(f"Turns done{status['turns']['finished']:,}")
        expect(card).to_contain_text(f"Prompt tokens reused{status['tokens']['reused']:,}")
        expect(page.get_by_role("img", name=re.compile("Answers by latency: .*[1-9]"))).to_be_visible()
        expect(page.get_by_role("img", name=re.compile("Streams by time to their first chunk"))).to_be_visible()
        expect(page.locator("article .label", has_text="it holds this session")).to_be_visible()

        page.get_by_role("button", name=f"Drain {drained}").click()
        page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
        expect(page.locator("#health")).to_have_text("1 of 2 instances ready")
        other = page.locator(".card", has=page.get_by_role("heading", name=drained, exact=True))
        expect(other.locator(".badge")).to_have_text("draining")
        assert [i["state"] for i in fleet.instances() if i["name"] == drained] == ["draining"]
        assert chat.ask("What color is the circle?")
        tab.check_accessibility()
        page.evaluate("document.getElementById('done').classList.add('visually-hidden')")
        tab.save_for_docs("dashboard.png", last="section[aria-labelledby=instances-title]")

        page.get_by_role("button", name=f"Resume {drained}").click()
        page.get_by_role("dialog").get_by_role("button", name="Resume", exact=True).click()
        expect(page.locator("#health")).to_have_text("2 of 2 instances ready")
        expect(other.get_by_role("button", name=f"Drain {drained}")).to_be_visible()
    chat.close()


def hash_of(session_id: str) -> str:
    """Return a session's hash, as in the access log and the admin plane."""
    return hashlib.blake2b(session_id.encode(), digest_size=8).hexdigest()


def press(page: Page, button: str, answer: str) -> None:
    """Press a button and confirm its dialog."""
    page.get_by_role("button", name=button, exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name=answer, exact=True).click()


def test_dashboard_pins_and_closes_a_session_and_cancels_a_request(
    fleet: Fleet, browser: Browser, drained: str
) -> None:
    """The instance and the session's client see the effects that the page reports."""
    settled, chats = fleet.settled(), []
    while len(chats) < 3:
        chat = open_session(fleet.client(), image=data_url(draw("circle", "red")))
        if settled.issuperset(fleet.holders(chat.id)):
            chats.append(chat)
        else:
            chat.close()
    for chat in chats:
        for question in ("What color is the circle?", "Where is it?"):
            assert chat.ask(question)
            assert chat.stream(question)
    chat = chats[0]
    submit = fleet.client().invoke_endpoint_async
    done = submit(EndpointName="llava", Body=b'{"inputs": "What color is grass?"}')["InferenceId"]
    failed = submit(EndpointName="llava", Body=b'{"type": "no such thing"}')["InferenceId"]
    name = hash_of(chat.id)

    def find() -> dict[str, Any]:
        [row] = requests.get(f"{fleet.admin}/sessions?session={name}", timeout=10).json()["sessions"]
        return dict(row)

    with open_tab(browser, fleet.admin) as tab:
        page = tab.page
        row = page.locator("#sessions tr", has_text=name)
        expect(row).to_contain_text(fleet.holders(chat.id)[0])
        expect(row).to_contain_text("device")
        press(page, f"Pin session {name}", "Pin")
        expect(row).to_contain_text("pinned")
        assert find()["is_pinned"] is True
        press(page, f"Unpin session {name}", "Unpin")
        expect(page.get_by_role("button", name=f"Pin session {name}", exact=True)).to_be_visible()
        assert find()["is_pinned"] is False
        expect(page.locator("#decisions tr", has_text=name).first).to_contain_text("it holds this session")

        expect(page.locator("#queue tr", has_text=done)).to_contain_text("completed")
        expect(page.locator("#queue tr", has_text=failed)).to_contain_text("must be one of")

        for instance in fleet.instances():
            requests.post(f"{fleet.admin}/instances/{instance['name']}/drain", timeout=10)
        waiting = submit(EndpointName="llava", Body=b"{}")["InferenceId"]
        press(page, f"Cancel {waiting}", "Cancel it")
        expect(page.locator("#queue tr", has_text=waiting)).to_contain_text("cancelled")
        expect(page.locator("#attention")).to_contain_text("is drained")
        page.evaluate("document.getElementById('done').classList.add('visually-hidden')")
        tab.save_for_docs("dashboard-lists.png", first="#sessions-title", last="#queue-section")

        press(page, f"Close session {name}", "Close")
        expect(page.locator("#done")).to_have_text(f"Session {name} is closed.")
        expect(row).to_have_count(0)
    assert fleet.holders(chat.id) == []
    with pytest.raises(ClientError, match="this session was closed"):
        chat.ask("And now?")
    for other in chats[1:]:
        other.close()


def test_request_page_names_the_models_own_error(fleet: Fleet, browser: Browser) -> None:
    """A prompt that is too long is found by the code of its error; an answered request has its tokens."""
    client = fleet.client()
    streamed = client.invoke_endpoint_with_response_stream(
        EndpointName="llava",
        Body=b'{"inputs": "What color is grass?", "stream": true, "parameters": {"max_new_tokens": 3}}',
    )
    assert b"".join(event["PayloadPart"]["Bytes"] for event in streamed["Body"])
    with pytest.raises(ClientError, match="ContextTooLong"):
        client.invoke_endpoint(EndpointName="llava", Body=json.dumps({"inputs": "grass " * 20_000}))
    with open_tab(browser, fleet.admin) as tab:
        page = tab.page
        page.locator("#decisions-error").select_option("ContextTooLong")
        page.locator("#decisions tr").first.get_by_role("link").click()
        expect(page.locator("#outcome")).to_have_text("424: ContextTooLong")
        expect(page.locator("#facts")).to_contain_text("POST /endpoints/llava/invocations")
        tab.check_accessibility()
        page.get_by_role("link", name="All requests").click()
        page.locator("#decisions tr", has_text="answered").first.get_by_role("link").click()
        expect(page.locator("#tokens")).to_contain_text(re.compile("Prompt, with the conversation[0-9]"))
        expect(page.locator("#tokens")).to_contain_text(re.compile("Generated[1-3]"))
        expect(page.locator("#times")).to_contain_text("Until the first token")
        tab.save_for_docs("dashboard-request.png")


@pytest.mark.slow
def test_killed_instance_shows_its_end_and_log(fleet: Fleet, browser: Browser) -> None:
    """The reason and the log's end are shown while the next process starts, and afterwards."""
    os.kill(find_jvm(fleet.run_dir, "llava-0"), signal.SIGKILL)
    with open_tab(browser, fleet.admin) as tab:
        page = tab.page
        card = page.locator(".card", has=page.get_by_role("heading", name="llava-0", exact=True))
        card.get_by_text("Previous process: it has ended").click()
        expect(card.get_by_role("region")).to_contain_text(re.compile("torchserve|TorchServe|W-90"))
        expect(page.locator("#health")).to_have_text("2 of 2 instances ready")
        expect(card.get_by_role("region")).to_be_visible()
        card.get_by_text("History", exact=True).click()
        expect(card.locator(".tile", has_text="Not in service").locator("b")).to_have_text("no")
        tab.check_accessibility()
        page.get_by_role("link", name="Chat").click()
        expect(page).to_have_url(f"{fleet.runtime}/chat")
