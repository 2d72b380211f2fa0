"""The dashboard's lists in a real browser with fake instances: sessions, decisions, asynchronous requests, queues and
the autoscaler, their actions, and names of clients, which are only ever text.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.browser import DESKTOP, PHONE, open_tab
from tests.proxy.conftest import MakeStage, Stage, make_session_id
from tests.proxy.fake_instance import Received, Wire, answering, refusing, silent
from tests.proxy.fake_many import FakeFleet
from tests.proxy.fake_sessions import FakeHolders, make_session
from torchmoor.config.routing import LateBindingSettings, MultiModelSettings, VariantSettings
from torchmoor.config.scaling import ScalingSettings
from torchmoor.proxy.instances.endpoint import ScalingDecision
from torchmoor.proxy.instances.instance import InstanceState
from torchmoor.wire.session_row import SESSION_FIELDS

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("quick_dashboard")]

HOSTILE = "<img src=x onerror=document.title='taken'>"
HASHES = tuple(f"{number:016x}" for number in range(0xA000, 0xA000 + 60))


@pytest.fixture
def holders() -> FakeHolders:
    return FakeHolders()


def row_of(page: Page, table: str, text: str) -> Any:
    return page.locator(f"#{table} tr", has_text=text)


def press(page: Page, button: str, answer: str, question: str = "") -> None:
    """Press a button and confirm its dialog."""
    page.get_by_role("button", name=button, exact=True).click()
    dialog = page.get_by_role("dialog", name=f"{question or button}?")
    dialog.get_by_role("button", name=answer, exact=True).click()


def check_is_text(page: Page, shown: str = HOSTILE) -> None:
    """Check that this name is shown as text and has no effect."""
    expect(page.locator("main")).to_contain_text(shown)
    assert page.title() == "torchmoor"
    assert page.locator("img").count() == 0


def test_sessions_are_found_sorted_pinned_and_closed(
    make_stage: MakeStage, holders: FakeHolders, browser: Browser
) -> None:
    """Each action asks first and shows its result, or advice if it failed."""
    stage = make_stage(prepare=holders)
    a, b = holders.of["a"], holders.of["b"]
    a.hold(make_session(name, turns=at, bytes=at << 20) for at, name in enumerate(HASHES[:59]))
    b.hold([make_session(HASHES[59], tier="journal", is_running=True, waiting=2), make_session("f" * 16, tier=HOSTILE)])
    a.num_evicted = 1234
    for scheme, size in (("light", DESKTOP), ("dark", PHONE)):
        with open_tab(browser, stage.proxy.admin_url, scheme=scheme, size=size) as tab:
            expect(tab.page.locator("#sessions-table")).to_contain_text("1 to 25 of 61 sessions")
            expect(tab.page.locator("#sessions-facts")).to_contain_text(
                re.compile(r"^evicted: 1.?234 by a; an evicted")
            )
            assert tab.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            tab.page.locator("#sessions-instance").select_option("b")
            expect(tab.page.locator("#sessions tr")).to_have_count(2)
            check_is_text(tab.page, HOSTILE[:16])
            tab.check_accessibility()

    with open_tab(browser, stage.proxy.admin_url) as tab:
        page = tab.page
        rows = page.locator("#sessions tr")
        titles = [each.title for each in SESSION_FIELDS if each.title]
        expect(page.locator("#sessions-table th[scope=col]")).to_have_text(
            ["Session", "Instance", "State", *titles, "Actions"]
        )
        expect(page.get_by_role("columnheader", name="Last used")).to_have_attribute("aria-sort", "descending")
        page.get_by_role("columnheader", name="Turns").get_by_role("button").click()
        expect(rows.first).to_contain_text(HASHES[58])
        expect(page.get_by_role("columnheader", name="Turns")).to_have_attribute("aria-sort", "descending")
        page.get_by_role("button", name="Next sessions").click()
        expect(page.locator("#sessions-table")).to_contain_text("26 to 50 of 61 sessions")
        page.get_by_label("Session begins with").fill("f")
        expect(rows).to_have_count(1)
        expect(rows.first).to_contain_text(HOSTILE[:16])
        page.get_by_label("Session begins with").fill("ts-seq")
        expect(page.locator("#sessions-facts")).to_contain_text("the digits 0 to 9 and a to f")
        page.get_by_label("Session begins with").fill("")
        page.locator("#sessions-instance").select_option("b")
        expect(rows).to_have_count(2)
        expect(row_of(page, "sessions", HASHES[59])).to_contain_text("2 waiting")

        expect(page.locator("#done")).to_have_css("display", "block")  # so that a screen reader hears its first text
        press(page, f"Close session {HASHES[59]}", "Cancel")
        press(page, f"Pin session {HASHES[59]}", "Pin")
        expect(page.locator("#done")).to_have_text(f"Session {HASHES[59]} is pinned.")
        expect(row_of(page, "sessions", HASHES[59])).to_contain_text("pinned")
        assert b.sessions[HASHES[59]]["is_pinned"]
        press(page, f"Unpin session {HASHES[59]}", "Unpin")
        expect(page.get_by_role("button", name=f"Pin session {HASHES[59]}", exact=True)).to_be_visible()
        page.get_by_role("button", name=f"Close session {HASHES[59]}").click()
        expect(page.get_by_role("dialog")).to_contain_text("running answer ends with an error")
        page.get_by_role("dialog").get_by_role("button", name="Close").click()
        expect(rows).to_have_count(1)
        expect(page.locator("#done")).to_have_text(f"Session {HASHES[59]} is closed.")
        assert HASHES[59] not in b.sessions

        b.refusal = (503, "JournalUnavailable", "the session's journal cannot be reached")
        press(page, f"Close session {'f' * 16}", "Close")
        expect(page.get_by_role("alert")).to_have_text(
            re.compile(r"the session's journal cannot be reached\. Try again in a moment\.")
        )
        assert "f" * 16 in b.sessions
        tab.complaints.clear()  # Chromium's own line for the refusal
        page.get_by_role("button", name="Dismiss").click()
        expect(page.get_by_role("alert")).to_be_hidden()


def test_refresh_leaves_focus_scroll_and_order_alone(
    make_stage: MakeStage, holders: FakeHolders, browser: Browser
) -> None:
    """A refresh does not move the button that a user is about to press."""
    stage = make_stage(prepare=holders)
    a = holders.of["a"]
    a.hold(make_session(name, last_used_at=1.8e9 - at) for at, name in enumerate(HASHES[:10]))
    with open_tab(browser, stage.proxy.admin_url) as tab:
        page = tab.page
        expect(page.locator("#sessions tr")).to_have_count(10)
        button = page.get_by_role("button", name=f"Close session {HASHES[4]}")
        button.focus()
        element = button.element_handle()
        scroll = page.evaluate("window.scrollY")
        order = page.locator("#sessions th").all_text_contents()

        a.hold([make_session(HASHES[9], last_used_at=1.9e9, turns=77)])
        expect(row_of(page, "sessions", HASHES[9])).to_contain_text("77")

        assert page.locator("#sessions th").all_text_contents() == order
        assert element.evaluate("element => element === document.activeElement && element.isConnected")
        assert page.evaluate("window.scrollY") == scroll
        button.blur()
        expect(page.locator("#sessions tr").first).to_contain_text(HASHES[9])


def test_hidden_page_asks_for_nothing(make_stage: MakeStage, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hidden page sends no requests, and continues when it is visible again."""
    monkeypatch.setattr("torchmoor.admin.dashboard.page.INTERVAL_S", 2.0)  # long enough to be idle between requests
    stage = make_stage()
    with open_tab(browser, "about:blank") as tab:
        page = tab.page
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.clock.install()
        page.goto(stage.proxy.admin_url)
        expect(page.locator("#health")).to_have_text("2 of 2 instances ready")
        page.wait_for_load_state("networkidle")
        hide = """is => { Object.defineProperty(document, "hidden", {value: is, configurable: true});
                          document.dispatchEvent(new Event("visibilitychange")); }"""
        page.evaluate(hide, True)
        before = len(asked)
        page.clock.run_for(600_000)
        assert len(asked) == before

        with page.expect_request("**/dashboard.json?*"):
            page.evaluate(hide, False)


def test_request_has_a_page_of_its_own(make_stage: MakeStage, browser: Browser) -> None:
    """A request found by its error has a page with times as a waterfall, tokens and the model's code."""
    stage = make_stage()
    client = stage.client()
    stage.a.behave = stage.b.behave = answering(
        headers={"X-Torchmoor-Context-Tokens": "1234", "X-Torchmoor-Queue-Ms": "0.2", "X-Torchmoor-Ttft-Ms": "0.4"}
    )
    requests_to(client, InferenceId=HOSTILE)
    stage.a.behave = stage.b.behave = refusing(400, "ContextTooLong", "no")
    requests_to(client)
    with open_tab(browser, stage.proxy.admin_url) as tab:
        page = tab.page
        rows = page.locator("#decisions tr")
        expect(rows).to_have_count(2)
        page.locator("#decisions-error").select_option("ContextTooLong")
        expect(rows).to_have_count(1)
        with page.expect_response("**/dashboard.json?*"):
            pass
        expect(page.locator("#attention")).to_have_text("")
        rows.get_by_role("link").click()
        expect(page.locator("#outcome")).to_have_text("424: ContextTooLong")
        expect(page.locator("#facts")).to_contain_text("POST /endpoints/llava/invocations")
        expect(page.locator("#facts")).to_contain_text("it has the fewest requests running")
        page.get_by_role("link", name="All requests").click()
        expect(page.locator("#health")).to_be_visible()
        answered = page.locator("#decisions tr", has_text="answered").get_by_role("link").get_attribute("href")

    for scheme, size in (("light", DESKTOP), ("dark", PHONE)):
        with open_tab(browser, f"{stage.proxy.admin_url}/{answered}", scheme=scheme, size=size) as tab:
            page = tab.page
            expect(page.locator("#tokens")).to_contain_text("Prompt, with the conversation1,234")
            for span in ("In all", "At the instance, until its answer begins", "Waits in the model's queue"):
                expect(page.locator("#times li", has_text=span)).to_be_visible()
            expect(page.locator("#facts")).to_contain_text(HOSTILE)
            assert page.locator("img").count() == 0
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            tab.check_accessibility()

    with open_tab(browser, f"{stage.proxy.admin_url}/dashboard/request.html?id=none") as tab:
        expect(tab.page.get_by_role("alert")).to_contain_text("There is no request none")


def test_decisions_are_told_in_words_filtered_and_paused(
    make_stage: MakeStage, holders: FakeHolders, browser: Browser
) -> None:
    """Decisions are shown in words with their results; a session's hash links to the session."""
    stage = make_stage(prepare=holders)
    stage.instances["b"].behave = refusing(400, "InvalidRequest", HOSTILE)
    client = stage.client()
    for name in ("a", "b"):
        for _ in range(3):
            requests_to(client, SessionId=make_session_id(name))
    with open_tab(browser, stage.proxy.admin_url) as tab:
        page = tab.page
        rows = page.locator("#decisions tr")
        expect(rows).to_have_count(6)
        expect(rows.first).to_contain_text("it holds this session")
        expect(rows.first).to_contain_text("424")
        tab.check_accessibility()
        page.locator("#decisions-instance").select_option("a")
        expect(rows).to_have_count(3)
        expect(rows.first).to_contain_text("answered")

        page.get_by_role("button", name="Pause").click()
        requests_to(client, SessionId=make_session_id("a"))
        with page.expect_response("**/dashboard.json?*"), page.expect_response("**/sessions?*"):
            pass
        expect(rows).to_have_count(3)
        page.get_by_role("button", name="Pause").click()
        expect(rows).to_have_count(4)

        rows.first.get_by_role("button").click()
        session = page.get_by_label("Session begins with").input_value()
        assert re.fullmatch("[0-9a-f]{16}", session)


def test_decisions_are_filtered_by_variant(make_stage: MakeStage, browser: Browser) -> None:
    """If an endpoint has several variants, the list names them, and the filter offers them beside the endpoint."""
    variants = tuple(VariantSettings(name=name, model="llava") for name in ("blue", "green"))
    stage = make_stage(variants=variants, homes={"a": "blue", "b": "green"})
    client = stage.client()
    for variant in ("blue", "green", "green"):
        requests_to(client, TargetVariant=variant)
    with open_tab(browser, stage.proxy.admin_url) as tab:
        page = tab.page
        rows = page.locator("#decisions tr")
        expect(rows).to_have_count(3)
        expect(row_of(page, "decisions", "llava / blue")).to_have_count(1)
        for place, count in (("llava / green", 2), ("llava", 3), ("llava / blue", 1)):
            page.locator("#decisions-endpoint").select_option(place)
            expect(rows).to_have_count(count)
            expect(page.locator("#decisions-endpoint")).to_have_value(place)
        expect(page.locator("#health")).to_have_text("2 of 2 instances ready")
        stage.set_state(InstanceState.DOWN, "a")
        expect(page.locator("#health")).to_have_text("no instance ready for llava / blue")


def requests_to(client: Any, **members: Any) -> None:
    """Send an invocation, however it ends."""
    with suppress(client.exceptions.ModelError):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}", **members)


def test_asynchronous_requests_are_told_with_their_reasons_and_cancelled(
    make_stage: MakeStage, browser: Browser, tmp_path: Path
) -> None:
    """Backlog, ages and counts are shown, the newest request first; a model's text is not markup."""

    async def behave(received: Received, wire: Wire) -> None:
        if received.body == b"slow":
            await wire.until_closed()
            return
        await (refusing(400, "InvalidRequest", HOSTILE) if received.body == b"bad" else answer)(received, wire)

    async def answer(received: Received, wire: Wire) -> None:
        await wire.answer(body=b"<script>document.title='taken'</script>")

    stage = make_stage(async_folder=tmp_path)
    for fake in stage.instances.values():
        fake.behave = behave
    client = stage.client()
    for name, body in (("good-1", b"good"), ("bad-1", b"bad"), ("slow-1", b"slow")):
        client.invoke_endpoint_async(EndpointName="llava", Body=body, InferenceId=name)
    with open_tab(browser, stage.proxy.admin_url) as tab:
        page = tab.page
        expect(page.locator("#queue-facts")).to_contain_text("1 request waiting or running, the oldest is")
        expect(page.locator("#queue-facts")).to_contain_text("1 failed")
        expect(row_of(page, "queue", "bad-1")).to_contain_text("failed")
        expect(row_of(page, "queue", "slow-1")).to_contain_text("running")
        expect(row_of(page, "queue", "good-1").get_by_role("link")).to_have_attribute(
            "href", "async-requests/good-1/result"
        )
        check_is_text(page)
        tab.check_accessibility()

        page.locator("#queue-state").select_option("FAILED")
        expect(page.locator("#queue tr")).to_have_count(1)
        page.locator("#queue-state").select_option("")
        press(page, "Cancel slow-1", "Cancel it")
        expect(page.locator("#done")).to_have_text("slow-1 is cancelled.")
        expect(row_of(page, "queue", "slow-1")).to_contain_text("cancelled")
        expect(page.locator("#queue-facts")).to_contain_text("1 cancelled")


def test_asynchronous_endpoints_come_and_go(stage: Stage, browser: Browser) -> None:
    """The page lists the present asynchronous endpoints, and removes the backlog of the last one."""
    names = ["first", "second"]
    backlog = {"endpoint": "first", "waiting": 5, "running": 0, "decided": 0, "oldest_age_s": 1, "requests": []}

    def show_names(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "async_endpoints": names})

    with open_tab(browser, stage.proxy.admin_url) as tab:
        page = tab.page
        page.route("**/dashboard.json*", show_names)
        page.route("**/async-requests*", lambda route: route.fulfill(json=backlog))
        expect(page.locator("#queue-endpoint option")).to_have_text(["first", "second"])
        expect(page.locator("#overview")).to_contain_text("5 asynchronous requests waiting or running at first.")
        names[1] = "third"
        expect(page.locator("#queue-endpoint option")).to_have_text(["first", "third"])
        names.clear()
        expect(page.locator("#queue-section")).to_be_hidden()
        expect(page.locator("#overview")).not_to_contain_text("asynchronous")
        page.unroute_all(behavior="wait")


def test_lines_of_one_text_do_not_pile_up(stage: Stage, browser: Browser) -> None:
    """Equal lines, such as problems of two variants, are replaced at each refresh."""
    with open_tab(browser, stage.proxy.admin_url) as tab:
        numbers = tab.page.evaluate(
            """async () => {
              const { keep } = await import("./dashboard/dom.js");
              const list = document.createElement("ul");
              const make = () => document.createElement("li");
              const draw = (keys) => keep(list, keys, make).length && list.children.length;
              return [draw(["a", "a"]), draw(["a", "a"]), draw(["a", "a"]), draw(["b"])];
            }"""
        )

    assert numbers == [2, 2, 2, 1]


def test_overview_says_what_waits_where_and_what_the_autoscaler_wants(make_stage: MakeStage, browser: Browser) -> None:
    """The overview counts waiting turns by instance and other requests together, and lists what needs attention."""
    variant = VariantSettings(model="llava", scaling=ScalingSettings(max_capacity=2))
    stage = make_stage(late_binding=LateBindingSettings(), capacity=1, variants=(variant,))
    for fake in stage.instances.values():
        fake.behave = silent
    connections = []
    for number in range(4):
        connections.append(stage.http())
        headers = {"X-Amzn-SageMaker-Session-Id": make_session_id("a")} if number == 3 else {}
        connections[-1].request("POST", "/endpoints/llava/invocations", b"{}", headers)
        stage.until(lambda: stage.outstanding() == min(2, number + 1), "it is at an instance, or waits")  # noqa: B023
    [dispatcher] = stage.proxy.data.dispatchers.all()
    stage.until(lambda: dispatcher.num_waiting == 2, "two wait")

    async def decide(backlog: int, found: str) -> None:
        dispatcher.variant.scale = ScalingDecision(2, backlog, f"{found} needs 8", is_limited=True)

    stage.run(decide(40, "a backlog of 40"))
    with open_tab(browser, stage.proxy.admin_url) as tab:
        page = tab.page
        expect(page.locator("#overview")).to_contain_text("2 of 2 instances ready, 2 requests wait for an instance.")
        expect(page.locator("#attention")).to_contain_text("2 requests waiting for an instance")
        expect(page.locator("#attention")).to_contain_text("a backlog of 40 needs 8")
        stage.run(decide(0, "a rate of 40 requests per minute"))
        expect(page.locator("#attention")).to_contain_text("a rate of 40 requests per minute needs 8")
        expect(page.locator("#variants")).to_contain_text("Turns of sessions, for a1")
        expect(page.locator("#variants")).to_contain_text("Others, for any instance1")
        expect(page.locator("#scaling")).to_contain_text("2 desired, 2 running")
        tab.check_accessibility()
        stage.set_state(InstanceState.DOWN)
        expect(page.locator("#attention")).to_contain_text("llava / AllTraffic has no ready instance.")
    for connection in connections:
        connection.close()


def test_models_with_hostile_names_are_text(make_stage: MakeStage, browser: Browser) -> None:
    """A hostile model name is text in the table, the dialog and the result."""
    fleet = FakeFleet({HOSTILE})
    stage = make_stage(multi_model=MultiModelSettings(), prepare=fleet)
    fleet.many["a"].tiers = {HOSTILE: "device"}
    with open_tab(browser, stage.proxy.admin_url) as tab:
        check_is_text(tab.page)
        press(tab.page, f"Pin {HOSTILE} at a", "Pin")
        expect(tab.page.locator("#done")).to_have_text(f"{HOSTILE} is pinned, on device.")
        check_is_text(tab.page)
        assert fleet.many["a"].pinned == {HOSTILE}
