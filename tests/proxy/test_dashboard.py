"""The dashboard in a real browser, before fake instances: every state, both colour schemes, a phone."""

import json
import re
import time
from pathlib import Path

import pytest
import requests
from playwright.sync_api import Browser, expect

from tests.browser import DESKTOP, PHONE, open_tab
from tests.certificates import make_certificate
from tests.proxy.conftest import LISTEN, MakeStage, Stage
from tests.proxy.fake_instance import Received, Wire, answering, silent, streaming
from tests.proxy.fake_many import FakeFleet
from tests.waiting import wait_until
from torchmoor.config.chat_page import ChatPageSettings
from torchmoor.config.credentials import Credentials
from torchmoor.config.routing import MultiModelSettings
from torchmoor.proxy.instances.instance import InstanceEnd, InstanceState

pytestmark = pytest.mark.usefixtures("quick_dashboard")

MIB = 1 << 20
STATUS = {
    "device": "cpu",
    "sessions": {"open": 37, "max": 1024, "opened": 40, "closed": 3, "adopted": 0},
    "memory": {
        "kv_bytes": 700 * MIB,
        "kv_capacity_bytes": 1024 * MIB,
        "features_bytes": 90 * MIB,
        "features_capacity_bytes": 256 * MIB,
        "host_bytes": 3 * MIB,
        "host_capacity_bytes": 512 * MIB,
    },
    "turns": {"running": 2, "waiting": 1, "finished": 812},
    "tokens": {"prefilled": 4000, "reused": 36_000, "generated": 51_234},
    "session_ids": ["ts-seq-a-secret"],
}


@pytest.fixture
def stage(make_stage: MakeStage) -> Stage:
    """Return four instances that report their status, stream for the streaming operation, and answer the rest."""
    stage = make_stage(names=("llava-0", "llava-1", "llava-2", "llava-3"))
    for fake in stage.instances.values():
        fake.behave = serve
        fake.on_status = answering(body=json.dumps(STATUS).encode())
    return stage


async def serve(request: Received, wire: Wire) -> None:
    if b"stream" in request.body:
        await streaming([b"one ", b"two"])(request, wire)
    else:
        await answering()(request, wire)


def test_page_is_only_for_its_own_origin(stage: Stage) -> None:
    """Its headers allow only its own files and forbid framing."""
    for path in (
        "/",
        "/dashboard/main.js",
        "/dashboard/models.js",
        "/dashboard/receipt.js",
        "/dashboard/session_row.js",
        "/dashboard/dashboard.css",
        "/dashboard.json",
    ):
        answer = stage.admin(path)

        assert answer.status_code == 200, path
        assert "default-src 'none'; script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert "<script>" not in stage.admin("").text


def test_name_of_elsewhere_that_leads_here_is_refused(stage: Stage) -> None:
    """A foreign name that resolves to loopback is refused, because its page would have the admin plane's origin."""
    url = stage.proxy.admin_url
    for host, status in (("evil.example:9080", 403), ("[", 403), ("localhost:9080", 200), ("[::1]:9080", 200)):
        assert requests.get(url, headers={"Host": host}, timeout=60).status_code == status, host
    assert (
        requests.post(
            f"{url}/instances/llava-0/drain",
            headers={"Host": "evil.example", "Origin": "http://evil.example"},
            timeout=60,
        ).status_code
        == 403
    )
    assert stage.instance("llava-0").state is InstanceState.READY


def test_numbers_of_the_last_minutes_as_json(stage: Stage) -> None:
    """The JSON has rates, quantiles, histograms, decisions and instances' reports, and no session's id."""
    client = stage.client()
    for _ in range(10):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}")
    answer = client.invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"stream")
    assert list(answer["Body"])
    pages: list[str] = []

    def is_complete() -> bool:
        pages.append(stage.admin("/dashboard.json").text)
        told = json.loads(pages[-1])
        is_sampled = sum(told["variants"][0]["latency"]["counts"]) == 11
        return is_sampled and all(instance["status"] is not None for instance in told["instances"])

    wait_until(is_complete, "a sample, and every instance's word")
    told = json.loads(pages[-1])
    [variant] = told["variants"]
    assert (variant["endpoint"], variant["ready"], variant["invocations"], variant["in_flight"]) == ("llava", 4, 11, 0)
    assert sum(variant["first_chunk"]["counts"]) == 1
    assert variant["decisions"] == {"least-outstanding-requests": 11}
    assert max(variant["series"]["requests_per_s"]) > 0
    assert {len(values) for values in variant["series"].values()} == {len(variant["series"]["seconds_ago"])}
    assert [i["status"]["sessions"]["open"] for i in told["instances"]] == [37] * 4
    assert [i["status"]["device"] for i in told["instances"]] == ["cpu"] * 4
    assert "ts-seq" not in pages[-1]


@pytest.mark.browser
def test_page_shows_every_state_in_any_light_and_on_a_phone(stage: Stage, browser: Browser) -> None:
    """In each colour scheme and on a phone, nothing is wider than the screen and axe-core reports nothing."""
    client = stage.client()
    for number in range(60):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}", InferenceId=str(number))
    for _ in range(8):
        answer = client.invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"stream")
        assert list(answer["Body"])
    stage.call(stage.registry.drain, "llava-1")
    stage.set_state(InstanceState.DOWN, "llava-2")
    stage.instances["llava-0"].behave = stage.instances["llava-3"].behave = silent
    connection = stage.http()
    connection.request("POST", "/endpoints/llava/invocations", b"{}")
    stage.until(lambda: stage.outstanding() == 1, "the request at an instance")

    for scheme, size in (("light", DESKTOP), ("dark", PHONE)):
        with open_tab(browser, stage.proxy.admin_url, scheme=scheme, size=size) as tab:
            page = tab.page
            expect(page.locator("#health")).to_have_text("2 of 4 instances ready")
            expect(page.locator(".card .badge")).to_have_text(["ready", "draining", "down", "ready"])
            expect(page.get_by_role("heading", name="Models")).to_be_hidden()
            expect(page.locator(".tile", has_text="In flight").locator("b")).to_have_text("1")
            expect(page.get_by_role("img", name=re.compile("Answers by latency"))).to_be_visible()
            expect(page.locator(".card").first).to_contain_text("700 MiB of 1 GiB")
            expect(page.locator(".card").first).to_contain_text("Turns waiting1Turns done812")
            expect(page.locator(".card").first).to_contain_text("Prompt tokens reused36,000")
            expect(page.locator(".card").nth(2).get_by_role("button")).to_have_count(0)
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            tab.check_accessibility()
    connection.close()


@pytest.mark.browser
def test_instance_that_is_down_shows_why_and_the_end_of_its_log(stage: Stage, browser: Browser) -> None:
    """The reason and the log's end are shown as text, whatever the log contains; the overview has the reason, too."""
    hostile = "<img src=x onerror=document.title='taken'>"
    stage.instance("llava-2").last_end = InstanceEnd(time.time(), "has ended with exit status 3", ("first", hostile))
    stage.set_state(InstanceState.DOWN, "llava-2")

    with open_tab(browser, stage.proxy.admin_url, scheme="dark", size=PHONE) as tab:
        page = tab.page
        card = page.locator(".card", has=page.get_by_role("heading", name="llava-2", exact=True))
        card.get_by_text("it has ended with exit status 3").click()
        expect(card.get_by_role("region", name="End of the log of llava-2")).to_have_text(f"first\n{hostile}")
        expect(page.locator("#attention")).to_contain_text("llava-2 is down: it has ended with exit status 3.")
        assert page.locator("img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        tab.check_accessibility()


@pytest.mark.browser
def test_longer_times_are_chosen_and_values_shown_on_hover(stage: Stage, browser: Browser) -> None:
    """The page shows the selected range, and the age of the value under the pointer; it links to the chat page."""
    client = stage.client()
    for _ in range(5):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}")
    with open_tab(browser, stage.proxy.admin_url) as tab:
        page = tab.page
        spark = page.locator(".tile", has_text="Requests").locator("svg")
        expect(spark.locator("path")).to_have_attribute("d", re.compile("L"))
        box = spark.bounding_box()
        page.mouse.move(box["x"] + box["width"] - 1, box["y"] + box["height"] / 2)
        expect(page.locator("#tip")).to_have_text(re.compile(r"^[\d.]+ · [0-2] s ago$"))
        page.mouse.move(0, 0)
        expect(page.locator("#tip")).to_be_hidden()
        with page.expect_response("**/dashboard.json?range=24h") as answered:
            page.locator("#range").select_option("24h")
        assert answered.value.ok
        expect(page.get_by_role("img", name=re.compile("Answers by latency"))).to_be_visible()
        tab.check_accessibility()
        page.get_by_role("link", name="Chat").click()
        expect(page).to_have_url(f"http://127.0.0.1:{stage.proxy.port}/chat")
    assert stage.admin("/dashboard.json?range=7d").status_code == 400


@pytest.mark.browser
def test_instance_has_a_history(stage: Stage, browser: Browser) -> None:
    """An instance's history is read when it is unfolded, and stays unfolded when the page refreshes."""
    url = f"{stage.proxy.admin_url}/instances/llava-1/history"
    wait_until(lambda: requests.get(url, timeout=60).status_code == 200, "a sample")
    assert requests.get(f"{url}?range=week", timeout=60).status_code == 400
    assert stage.admin("/instances/other/history").status_code == 404
    for scheme, size in (("light", DESKTOP), ("dark", PHONE)):
        with open_tab(browser, stage.proxy.admin_url, scheme=scheme, size=size) as tab:
            page = tab.page
            card = page.locator(".card", has=page.get_by_role("heading", name="llava-1", exact=True))
            card.get_by_text("History", exact=True).click()
            expect(card.locator(".tile", has_text="In flight").locator("b")).to_have_text("0")
            expect(card.locator(".tile", has_text="Not in service").locator("b")).to_have_text("no")
            stage.set_state(InstanceState.DOWN, "llava-1")
            expect(card.locator(".tile", has_text="Not in service").locator("b")).to_have_text("yes")
            stage.set_state(InstanceState.READY, "llava-1")
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            tab.check_accessibility()


@pytest.mark.browser
def test_no_link_to_a_chat_page_that_is_off(make_stage: MakeStage, browser: Browser) -> None:
    stage = make_stage(chat_page=ChatPageSettings(is_on=False))
    with open_tab(browser, stage.proxy.admin_url) as tab:
        expect(tab.page.locator("#health")).to_have_text("2 of 2 instances ready")
        expect(tab.page.locator("#chat-link")).to_be_hidden()


@pytest.mark.browser
@pytest.mark.needs("openssl")
def test_link_to_the_chat_page_has_the_data_planes_scheme(
    make_stage: MakeStage, browser: Browser, tmp_path: Path
) -> None:
    """The data plane often has a certificate, and the admin plane, which listens on loopback, has none."""
    certificate, key = make_certificate(tmp_path, "tls")
    stage = make_stage(listen=LISTEN.replace(tls_certificate=str(certificate), tls_key=str(key)))
    with open_tab(browser, stage.proxy.admin_url) as tab:
        expect(tab.page.locator("#chat-link")).to_have_attribute("href", f"{stage.proxy.runtime_url}/chat")


@pytest.mark.browser
def test_the_end_of_a_question_does_not_answer_the_next_one(stage: Stage, browser: Browser) -> None:
    """A question that is asked before the browser has reported the end of the last one has an answer of its own."""
    with open_tab(browser, stage.proxy.admin_url) as tab:
        button = tab.page.get_by_role("button", name="Drain llava-0")
        button.evaluate(
            """element => {
                element.click();
                document.querySelector("dialog[open]").close("no");
                element.click();
            }"""
        )
        tab.page.get_by_role("dialog").get_by_role("button", name="Drain").click()

        expect(tab.page.locator(".card .badge").first).to_have_text("draining")


@pytest.mark.browser
def test_keyboard_alone_drains_an_instance(stage: Stage, browser: Browser) -> None:
    """Tab reaches the button, Enter opens a question whose default answer is "no", and Escape changes nothing."""
    with open_tab(browser, stage.proxy.admin_url) as tab:
        page = tab.page
        button = page.get_by_role("button", name="Drain llava-0")
        expect(button).to_be_visible()
        page.keyboard.press("Tab")
        for _ in range(20):
            if button.evaluate("element => element === document.activeElement"):
                break
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="Drain llava-0?")
        expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
        tab.check_accessibility()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(button).to_be_focused()
        assert stage.instance("llava-0").state is InstanceState.READY

        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")

        expect(page.locator(".card .badge").first).to_have_text("draining")
        expect(page.locator("#done")).to_have_text("llava-0 is draining.")
        assert stage.instance("llava-0").state is InstanceState.DRAINING


@pytest.mark.browser
def test_models_are_shown_and_acted_on(make_stage: MakeStage, browser: Browser) -> None:
    """Models have location, size, last use and order of eviction; each button asks first and shows its result."""
    fleet = FakeFleet({"bert-small", "vit-tiny", "llama-nano"})
    stage = make_stage(multi_model=MultiModelSettings(), prepare=fleet)
    fleet.many["a"].tiers = {"bert-small": "device", "vit-tiny": "disk"}
    fleet.many["b"].tiers = {f"variant-{number}": "host" for number in range(99)}
    for scheme, size in (("light", DESKTOP), ("dark", PHONE)):
        with open_tab(browser, stage.proxy.admin_url, scheme=scheme, size=size) as tab:
            expect(tab.page.locator("#models-table")).to_contain_text("1 to 25 of 101 models")
            expect(tab.page.locator("#models tr").first).to_contain_text("bert-small")
            assert tab.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            tab.check_accessibility()

    with open_tab(browser, stage.proxy.admin_url) as tab:
        page = tab.page
        page.get_by_label("Name contains").fill("BERT")
        row = page.locator("#models tr")
        expect(row).to_have_count(1)
        for text in ("bert-small", "a", "device", "1,000 B", "0 s ago", "next"):
            expect(row.get_by_text(text, exact=True)).to_be_visible()
        expect(page.locator(".card").first).to_contain_text("Models (device)")

        def press(button: str, answer: str) -> None:
            page.get_by_role("button", name=button).click()
            page.get_by_role("dialog", name=f"{button}?").get_by_role("button", name=answer).click()

        press("Unload bert-small at a", "Cancel")
        press("Pin bert-small at a", "Pin")
        expect(page.locator("#done")).to_have_text("bert-small is pinned, on device.")
        expect(row.get_by_text("pinned", exact=True)).to_be_visible()
        assert fleet.many["a"].pinned == {"bert-small"}
        press("Unpin bert-small at a", "Unpin")
        expect(row.get_by_text("next", exact=True)).to_be_visible()
        press("Unload bert-small at a", "Unload")
        expect(row).to_have_count(0)
        assert "bert-small" not in fleet.many["a"].tiers

        page.route("**/prewarm*", lambda route: route.fulfill(json={"instances": [{"status": 200, "tier": "loading"}]}))
        page.get_by_label("Name contains").fill("llama-large")
        page.get_by_role("button", name="Prewarm it").click()
        page.get_by_role("dialog", name="Prewarm llama-large?").get_by_role("button", name="Prewarm").click()
        expect(page.locator("#done")).to_have_text("llama-large is being loaded.")
        page.unroute_all()
        page.get_by_label("Name contains").fill("llama-nano")
        page.get_by_role("button", name="Prewarm it").click()
        page.get_by_role("dialog", name="Prewarm llama-nano?").get_by_role("button", name="Prewarm").click()
        expect(row.get_by_text("llama-nano", exact=True)).to_be_visible()

        page.get_by_label("Name contains").fill("nobody")
        page.get_by_role("button", name="Prewarm it").click()
        page.get_by_role("dialog", name="Prewarm nobody?").get_by_role("button", name="Prewarm").click()  # prose: allow
        expect(page.get_by_role("alert")).to_contain_text("there is no model nobody")  # prose: allow
        tab.complaints.clear()  # Chromium's own line for the refusal


@pytest.mark.browser
def test_page_asks_for_the_token_that_the_admin_plane_has(make_stage: MakeStage, browser: Browser) -> None:
    """The browser asks for the token as a password and sends it with the page's requests."""
    token = "a-token-that-nobody-guesses"
    stage = make_stage(credentials=Credentials(admin_token=token))
    assert stage.admin("/dashboard.json").status_code == 401

    with open_tab(browser, stage.proxy.admin_url, token=token) as tab:
        expect(tab.page.locator("#health")).to_have_text("2 of 2 instances ready")


@pytest.mark.browser
def test_page_says_when_the_proxy_is_gone(make_stage: MakeStage, browser: Browser) -> None:
    """When the proxy is gone, the page says that its data are old."""
    stage = make_stage()
    with open_tab(browser, stage.proxy.admin_url) as tab:
        expect(tab.page.locator("#health")).to_have_text("2 of 2 instances ready")
        tab.page.route("**/dashboard.json?*", lambda route: route.abort())

        expect(tab.page.get_by_role("alert")).to_contain_text("The proxy does not answer since")
        tab.page.unroute("**/dashboard.json?*")
        expect(tab.page.get_by_role("alert")).to_be_hidden()
        tab.complaints.clear()  # Chromium's own line for the failed request
