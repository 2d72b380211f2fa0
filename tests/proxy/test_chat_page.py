"""The chat page in a real browser, before fake instances: requests, display and errors."""

import base64
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import requests
from botocore.eventstream import EventStreamBuffer
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser import DESKTOP, Tab, give_files, open_tab, submit_question, wait_ready
from tests.proxy.conftest import NO_PROBES, MakeStage, Stage
from tests.proxy.fake_chat import RECEIPT, FakeChat, lines
from tests.proxy.fake_instance import Gate, Received, Wire, answering, refusing, streaming
from tests.torchserve.drawings import encoded
from tests.waiting import wait_until
from torchmoor.config.chat_page import ChatPageSettings
from torchmoor.config.credentials import Credentials
from torchmoor.proxy.http import eventstream
from torchmoor.proxy.routing import reasons
from torchmoor.proxy.routing.reported_status import ReportedStatus
from torchmoor.wire import receipt

SMALL_PHONE = (360, 740)
WATCH = """
() => {
  window.seen = [];
  const log = document.querySelector("#log");
  const watcher = new MutationObserver(() => seen.push(log.textContent));
  watcher.observe(log, { subtree: true, childList: true, characterData: true });
}
"""
FILES = ("/chat", "/chat/main.js", "/chat/session.js", "/chat/eventstream.js", "/chat/chat.css", "/chat/receipt.js")


@pytest.fixture
def chat(stage: Stage) -> FakeChat:
    status = json.dumps({"capabilities": {"can_see": True, "max_images": 8}}).encode()
    for name, fake in stage.instances.items():
        stage.instance(name).take_status(ReportedStatus(can_see=True, max_images=8))
        fake.on_status = answering(body=status)  # the proxy asks again after some seconds
    return FakeChat(stage)


@pytest.fixture
def tab(chat: FakeChat, browser: Browser) -> Iterator[Tab]:
    with open_tab(browser, f"{chat.stage.proxy.runtime_url}/chat") as opened:
        expect(opened.page.locator("#frame[inert]")).to_have_count(0)
        yield opened


def picture_file(name: str, size: tuple[int, int] = (64, 48), form: str = "PNG") -> dict[str, Any]:
    """Return a file as Playwright takes it, with a picture that compresses badly."""
    noise = Image.frombytes("RGB", size, random.Random(7).randbytes(size[0] * size[1] * 3))
    return {"name": name, "mimeType": f"image/{form.lower()}", "buffer": encoded(noise, form)}


def open_second(first: Page, question: str) -> Page:
    """Open another tab of the same browser, and show the session that begins with this question."""
    second = first.context.new_page()
    second.goto(first.url)
    wait_ready(second)
    second.locator(".switch", has_text=question).click()
    return second


def ask(page: Page, question: str) -> Locator:
    """Type the question and press Enter once the page is idle; return the new turn."""
    wait_ready(page)
    turns = page.locator(".turn").count()
    page.get_by_role("textbox", name="Your question").fill(question)
    submit_question(page)
    turn = page.locator(".turn").nth(turns)
    expect(turn).to_be_visible()
    return turn


def keep_sessions(page: Page) -> None:
    """Let the browser keep sessions."""
    page.locator("#settings summary").click()
    page.get_by_label("Keep sessions in this browser").check()
    expect(page.locator("#announcer")).to_contain_text("Sessions are kept")


def kept_values(page: Page, field: str) -> list[str]:
    """Return a field of all turns that the browser keeps."""
    return page.evaluate(
        """async (field) => {
          const { load } = await import(new URL("chat/history.js", document.baseURI));
          return (await load()).flatMap((record) => record.turns.map((turn) => turn[field]));
        }""",
        field,
    )


def images_of(body: dict[str, Any]) -> list[Image.Image]:
    """Return the pictures in a request's body."""
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in body["images"]]


def test_every_tier_of_a_receipt_has_words() -> None:
    """The page has a text for each tier that docs/runtime-api.md lists; it would show another one by its name."""
    page = (Path(__file__).parents[2] / "docs" / "runtime-api.md").read_text()
    [row] = re.findall(r"^\| `X-Torchmoor-Cache-Tier` \|(.*)", page, re.MULTILINE)
    words = files("torchmoor.proxy.api.chat_page").joinpath("words.js").read_text()
    [tiers] = re.findall(r"const TIERS = \{(.*?)\};", words, re.DOTALL)

    assert set(re.findall(r"`([a-z-]+)`", row)) == set(re.findall(r'^  "?([a-z-]+)"?: ', tiers, re.MULTILINE))


# Without a browser


def test_files_are_only_for_their_own_origin_and_sent_again_only_if_changed(stage: Stage) -> None:
    """Files have strict headers and an ETag that saves the body, HEAD works as GET, and other paths are not served."""
    for path in FILES:
        url = stage.proxy.runtime_url + path
        answer = requests.get(url, timeout=60)

        assert answer.status_code == 200, path
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers
        again = requests.get(url, headers={"If-None-Match": answer.headers["ETag"]}, timeout=60)
        assert (again.status_code, again.content) == (304, b"")
        head = requests.head(url, timeout=60)
        assert (head.status_code, head.headers["Content-Length"]) == (200, str(len(answer.content)))
        assert requests.post(url, timeout=60).status_code == 404
    assert not re.search(
        r"<script(?! type=\"module\" src=)|<style|style=|\son\w+=", requests.get(url[:-9], timeout=60).text
    )
    assert requests.get(f"{stage.proxy.runtime_url}/chat/page.py", timeout=60).status_code == 404


def test_a_browser_is_led_to_the_page_and_a_client_is_not(stage: Stage) -> None:
    """GET / redirects clients that accept HTML, with an address that stays below a path prefix of a front server."""
    url = stage.proxy.runtime_url
    found = requests.get(url, headers={"Accept": "text/html,*/*"}, allow_redirects=False, timeout=60)

    assert (found.status_code, found.headers["Location"]) == (307, "chat")
    assert requests.get(f"{url}/chat/", timeout=60).url == f"{url}/chat"
    assert requests.get(url, headers={"Accept": "application/json"}, timeout=60).status_code == 404


def test_page_can_be_switched_off(make_stage: MakeStage) -> None:
    """A page that is switched off gives the error of an unknown path."""
    url = make_stage(chat_page=ChatPageSettings(is_on=False)).proxy.runtime_url

    for path in ("/", "/chat", "/chat/main.js", "/chat/endpoints"):
        answer = requests.get(url + path, headers={"Accept": "text/html"}, timeout=60)
        assert (answer.status_code, answer.headers["x-amzn-errortype"]) == (404, "UnknownOperationException")


def test_only_the_page_itself_is_told_to_those_without_credentials(make_stage: MakeStage) -> None:
    """The names of endpoints require credentials like everything else."""
    url = make_stage(credentials=Credentials(tokens={"alice": "a-token-of-alice"})).proxy.runtime_url
    mine = {"Authorization": "Bearer a-token-of-alice"}

    assert requests.get(f"{url}/chat", timeout=60).status_code == 200
    assert requests.get(f"{url}/chat/endpoints", timeout=60).status_code == 403
    told = requests.get(f"{url}/chat/endpoints", headers=mine, timeout=60).json()
    assert told.pop("reasons") == reasons.SENTENCES
    assert told == {
        "endpoints": ["llava"],
        "capabilities": {"llava": {"can_see": None, "max_images": None}},
        "max_body_bytes": 6 << 20,
    }


# The stream's decoder


@pytest.mark.browser
def test_decoder_agrees_with_botocore_however_the_bytes_are_cut(tab: Tab) -> None:
    """Frames that are cut at random, damaged or truncated give the same events, or errors, as in botocore."""
    rng = random.Random(11)
    cases: list[dict[str, Any]] = []
    expected: list[list[list[Any]] | None] = []
    for number in range(200):
        data = bytearray()
        for _ in range(rng.randrange(1, 6)):
            if rng.random() < 0.2:
                data += eventstream.exception("ModelStreamError", "gröber Fehler " * rng.randrange(4), "StreamBroken")
            else:
                data += eventstream.payload_part(rng.randbytes(rng.choice((0, 1, 7, 300))))
        if number % 5 == 4:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if number % 7 == 6:
            del data[rng.randrange(len(data)) :]
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 1, 5, 100))))
        cases.append({"data": base64.b64encode(data).decode(), "cuts": cuts})
        expected.append(decode_as_botocore(bytes(data)))

    decoded = tab.page.evaluate(
        """async (cases) => {
          const { FrameReader } = await import(new URL("chat/eventstream.js", document.baseURI));
          return cases.map(({ data, cuts }) => {
            const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
            const reader = new FrameReader();
            const frames = [];
            try {
              [...cuts, bytes.length].reduce((from, to) => (frames.push(...reader.feed(bytes.slice(from, to))), to), 0);
              reader.end();
            } catch (error) {
              return error.name === "BrokenFrame" ? null : String(error);
            }
            const hex = (bytes) => [...bytes].map((each) => each.toString(16).padStart(2, "0")).join("");
            return frames.map(({ headers, payload }) => [Object.fromEntries(headers), hex(payload)]);
          });
        }""",
        cases,
    )

    assert decoded == expected
    assert 20 < sum(each is None for each in expected) < 100


def decode_as_botocore(data: bytes) -> list[list[Any]] | None:
    """Return headers and payload of each event; None if the bytes are damaged or end within one."""
    buffer = EventStreamBuffer()
    buffer.add_data(data)
    events: list[list[Any]] = []
    num_bytes = 0
    try:
        for event in buffer:
            events.append([dict(event.headers), event.payload.hex()])
            num_bytes += event.prelude.total_length
    except Exception:
        return None
    return events if num_bytes == len(data) else None


# Receipts


@pytest.mark.browser
def test_a_new_number_of_receipts_is_shown_by_its_label(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, browser: Browser
) -> None:
    """A new number in wire/receipt.py is shown by its label; an answer without it has no such line."""
    new = receipt.ReceiptField("x-torchmoor-saved-tokens", "saved_tokens", True, "Saved")
    monkeypatch.setattr(receipt, "RECEIPT_FIELDS", (*receipt.RECEIPT_FIELDS, new))
    with open_tab(browser, f"{make_stage().proxy.runtime_url}/chat") as tab:
        rows = tab.page.evaluate(
            """async () => {
              const { receiptRows } = await import(new URL("chat/words.js", document.baseURI));
              const measured = { ttftMs: null, numTokens: 0, tokensPerS: null };
              const answers = [{ saved_tokens: 7 }, {}, { saved_tokens: null }];
              return answers.map((each) => receiptRows({ ...each, ...measured }));
            }"""
        )

    assert [[row for row in each if row[0] == "Saved"] for each in rows] == [[["Saved", "7"]], [], []]


# Conversations


@pytest.mark.browser
def test_two_presses_to_a_streamed_answer_with_its_receipt(chat: FakeChat, tab: Tab) -> None:
    """A sample picture and a sample question: the answer grows token by token, and its receipt shows its cost."""
    page, chat.gate = tab.page, Gate()
    expect(page.get_by_role("heading", name="Ask a model about your pictures")).to_be_visible()
    expect(page.get_by_role("textbox", name="Your question")).to_be_focused()
    tab.check_accessibility()
    page.get_by_role("button", name="Take a red circle and a blue square").click()
    page.get_by_role("button", name="What color is the circle?").click()

    turn = page.locator(".turn")
    expect(turn.locator(".text")).to_have_text("The")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.locator("#announcer")).not_to_contain_text("Answer")
    chat.gate.open()
    expect(turn.locator(".text")).to_have_text("The circle is red.")
    expect(page.locator("#announcer")).to_contain_text("Answer: The circle is red.")
    expect(turn.locator(".receipt summary")).to_have_text(re.compile(r"^[ab] · 10 of 123 tokens · [\d.]+ m?s$"))
    expect(turn.locator(".receipt dl")).to_contain_text("Chosen becauseit holds this session")
    expect(turn.locator(".receipt dl")).to_contain_text("CacheKV cache hit")
    expect(turn.locator(".receipt dl")).to_contain_text("Tokens computed10 of 123 in context")
    expect(turn.locator(".receipt dl")).to_contain_text(
        re.compile(r"First tokenafter [\d.]+ m?sAt the serverafter 8.2 ms")
    )
    expect(turn.locator(".receipt dl")).to_contain_text(re.compile(r"Answer5 tokensSpeed\d+ tokens/s"))
    expect(page.get_by_role("textbox", name="Your question")).to_be_focused()
    opened, asked = chat.bodies
    assert [image.size for image in images_of(opened)] == [(256, 256)]
    assert asked == {"type": "send_text_prompt", "prompt_text": "What color is the circle?", "stream": True}


@pytest.mark.browser
def test_pictures_are_scaled_down_split_and_removed(chat: FakeChat, tab: Tab) -> None:
    """Large pictures are scaled down and sent in several requests; a file that is not a picture gets a notice."""
    page = tab.page
    files = [picture_file(f"noise{n}.jpg", (1400, 1000), "JPEG") for n in range(3)]
    wide = picture_file("wide.png", (3200, 100))
    give_files(page, [*files, wide, {"name": "a.png", "mimeType": "image/png", "buffer": b"no picture"}])
    expect(page.locator("#pending li")).to_have_count(4)
    expect(page.locator("#pending")).to_contain_text("scaled down from 3200 \u00d7 100")
    refusal = re.compile("a.png is not a picture that this browser can read")
    expect(page.locator("#composer-notice")).to_have_text(refusal)
    expect(page.get_by_role("alert")).to_contain_text("a.png")
    page.get_by_role("button", name="Remove noise0.jpg").click()
    expect(page.get_by_role("textbox", name="Your question")).to_be_focused()
    tab.check_accessibility()

    expect(ask(page, "What is this?").locator(".text")).to_have_text("The circle is red.")
    opened, *added, _ = chat.bodies
    assert opened["requestType"] == "NEW_SESSION"
    assert {body["type"] for body in added} == {"add_images"}
    sizes = [image.size for body in (opened, *added) for image in images_of(body)]
    assert sizes == [(1400, 1000), (1400, 1000), (1600, 50)]
    assert all(len(each.body) < 2 << 20 for each in chat.received)
    give_files(page, [picture_file(f"{n}.png") for n in range(6)])
    expect(page.locator("#pending li")).to_have_count(5)
    expect(page.locator("#composer-notice")).to_contain_text("A session may have 8 pictures")


@pytest.mark.browser
def test_a_picture_that_is_still_being_read_belongs_to_the_question(chat: FakeChat, tab: Tab) -> None:
    """Pressing Enter at once includes the picture in the question."""
    page = tab.page
    wait_ready(page)
    page.evaluate(
        """() => {
          Image.prototype.decode = () => new Promise((resolve) => {
            window.goOn = resolve;
            document.body.dataset.decodes = "";
          });
        }"""
    )
    give_files(page, picture_file("slow.png"))
    page.get_by_role("textbox", name="Your question").fill("What is this?")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator("body[data-decodes]")).to_have_count(1)
    page.evaluate("() => goOn()")

    expect(page.locator(".turn .text")).to_have_text("The circle is red.")
    assert len(chat.bodies[0]["images"]) == 1
    assert chat.asked() == ["What is this?"]


@pytest.mark.browser
def test_pictures_are_dropped_and_pasted(chat: FakeChat, tab: Tab) -> None:
    page, data = tab.page, base64.b64encode(picture_file("x.png")["buffer"]).decode()
    for kind in ("drop", "paste"):
        page.evaluate(
            """([kind, data]) => {
              const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
              const files = new DataTransfer();
              files.items.add(new File([bytes], `${kind}.png`, { type: "image/png" }));
              const how = { bubbles: true, cancelable: true, dataTransfer: files, clipboardData: files };
              const event = kind === "drop" ? new DragEvent(kind, how) : new ClipboardEvent(kind, how);
              document.querySelector("h1").dispatchEvent(event);
            }""",
            [kind, data],
        )
        expect(page.get_by_role("img", name=f"{kind}.png")).to_be_visible()


@pytest.mark.browser
def test_words_of_models_people_and_files_are_never_markup(chat: FakeChat, tab: Tab) -> None:
    """Markup in an answer, a question, a file name or an error is shown as text."""
    evil = "<img src=x onerror=\"document.title='evil'\"><script>document.title='evil'</script>"
    chat.words = (evil, "\u202e", evil)
    page = tab.page
    give_files(page, picture_file(f"{evil}.png".replace("/", "")))
    turn = ask(page, evil)

    expect(turn.locator(".text")).to_contain_text(evil)
    expect(turn.locator('[data-is="question"]')).to_have_text(evil)
    expect(page.locator(".switch").first).to_contain_text(evil)
    assert page.locator("main script, #log img:not(.thumbs img)").count() == 0
    assert page.title().startswith("<img")


@pytest.mark.browser
def test_sessions_beside_each_other(chat: FakeChat, tab: Tab) -> None:
    """One session answers while another is shown; each keeps its draft; all are closed at the server."""
    page, chat.gate = tab.page, Gate()
    first = ask(page, "First question")
    expect(first.locator(".text")).to_have_text("The")
    page.get_by_role("button", name="New session").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("textbox", name="Your question").fill("half a que")
    page.locator(".switch", has_text="First question").click()
    expect(page.locator("#title")).to_have_text("First question")
    chat.gate.open()
    expect(page.locator(".turn .text")).to_have_text("The circle is red.")
    page.locator(".switch", has_text="New session").click()
    expect(page.get_by_role("textbox", name="Your question")).to_have_value("half a que")
    expect(ask(page, "Second question").locator(".text")).to_have_text("The circle is red.")

    page.get_by_role("button", name="Close session: Second question").click()
    expect(page.locator("#title")).to_have_text("First question")
    expect(page.locator(".switch", has_text="First question")).to_be_focused()
    wait_until(lambda: chat.bodies[-1] == {"type": "close_session"}, "the closing of the session")
    assert chat.num_opened == 2
    sessions = [each.headers["x-amzn-sagemaker-session-id"] for each in chat.received]
    assert sessions[-1] == sessions[-2] != sessions[1]

    page.goto("about:blank")
    wait_until(lambda: len(chat.bodies) == 6, "the end of the other session, which the page tells as it goes")
    assert chat.bodies[-1] == {"type": "close_session"}
    assert chat.received[-1].headers["x-amzn-sagemaker-session-id"] == sessions[1]


@pytest.mark.browser
def test_a_stopped_answer_stays_and_is_continued(chat: FakeChat, tab: Tab) -> None:
    """The page keeps the stopped answer, as the instance does, and the model can continue it."""
    page, chat.gate = tab.page, Gate()
    turn = ask(page, "What color is the circle?")
    expect(turn.locator(".text")).to_have_text("The")
    page.get_by_role("button", name="Stop").click()

    expect(turn).to_contain_text("Stopped. The conversation has the part of the answer that is shown.")
    expect(page.get_by_role("textbox", name="Your question")).to_be_focused()
    expect(turn.locator(".text")).to_have_text("The circle")
    assert chat.bodies[-1] == {"type": "stop_answer"}
    tab.check_accessibility()
    turn.get_by_role("button", name="Continue").click()
    expect(page.locator(".turn .text")).to_have_text(["The circle", "The circle is red."])
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    assert chat.asked() == ["What color is the circle?", "Continue where you stopped."]


@pytest.mark.browser
def test_an_answer_that_its_handler_cannot_end_is_cut_and_asked_for_again(chat: FakeChat, browser: Browser) -> None:
    """If a third-party handler cannot stop, the page says that the turn is lost and asks the question again."""
    with open_tab(browser, f"{chat.stage.proxy.runtime_url}/chat", refusals=("424",)) as tab:
        page, chat.gate = tab.page, Gate()
        turn = ask(page, "What color is the circle?")
        expect(turn.locator(".text")).to_have_text("The")
        chat.instead = [refusing(400, "InvalidRequest", "there is no such type")]
        page.keyboard.press("Escape")

        expect(turn).to_contain_text("Stopped. The question and its answer are part of the conversation only if")
        chat.gate.open()
        turn.get_by_role("button", name="Ask again").click()
        expect(turn.locator(".text")).to_have_text("The circle is red.")
        expect(turn.get_by_role("button", name="Ask again")).to_be_hidden()
        asked = [each for each in chat.received if b"prompt_text" in each.body]
        assert len({each.headers["amz-sdk-invocation-id"] for each in asked}) == 2


@pytest.mark.browser
def test_a_handler_that_streams_plain_text_is_shown_too(chat: FakeChat, tab: Tab) -> None:
    """A character whose bytes are split between chunks is shown correctly."""
    smile = "a 🙂!".encode()
    chat.instead = []
    expect(ask(tab.page, "one").locator(".text")).to_have_text("The circle is red.")
    chat.instead = [streaming([smile[:3], smile[3:4], smile[4:]])]

    expect(ask(tab.page, "two").locator(".text")).to_have_text("a 🙂!")
    assert chat.asked() == ["one", "two"]


@pytest.mark.browser
def test_an_answer_that_was_cut_off_is_continued(chat: FakeChat, tab: Tab) -> None:
    """Only the last answer has the button."""
    page, chat.finish = tab.page, "length"
    first = ask(page, "Tell me all.")
    expect(first).to_contain_text("The answer was cut off at its maximum length.")
    chat.finish = "eos_token"
    first.get_by_role("button", name="Continue").click()

    expect(page.locator(".turn .text")).to_have_text(["The circle is red."] * 2)
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    assert chat.asked() == ["Tell me all.", "Continue where you stopped."]


@pytest.mark.browser
def test_settings_are_sent_with_the_next_questions(chat: FakeChat, tab: Tab) -> None:
    """A wrong value is marked at its field and nothing is sent; an empty field is left out."""
    page = tab.page
    settings = page.locator("#settings")
    settings.locator("summary").click()
    tab.check_accessibility()
    page.get_by_label("Longest answer").fill("0")
    settings.locator("summary").click()
    page.get_by_role("textbox", name="Your question").fill("one")
    submit_question(page)
    expect(page.get_by_label("Longest answer")).to_be_focused()
    expect(page.locator(".turn")).to_have_count(0)

    page.get_by_label("Longest answer").fill("40")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("11")
    page.get_by_role("textbox", name="Your question").press("Enter")
    expect(page.locator(".turn .text")).to_have_text("The circle is red.")
    assert chat.bodies[-1]["parameters"] == {"max_new_tokens": 40, "temperature": 0.7, "seed": 11}

    for name in ("Longest answer", "Temperature"):
        page.get_by_label(name).fill("")
    expect(ask(page, "two").locator(".text")).to_have_text("The circle is red.")
    assert chat.bodies[-1]["parameters"] == {"seed": 11}


@pytest.mark.browser
def test_a_system_prompt_holds_for_its_session(chat: FakeChat, tab: Tab) -> None:
    """The system prompt is sent with each question, fixed by the first one, and proposed for the next session."""
    page = tab.page
    wait_ready(page)
    page.locator("#settings summary").click()
    field = page.get_by_label("System prompt")
    field.fill("Answer in Latin.")
    expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
    expect(field).to_be_disabled()
    expect(page.locator("#system-note")).to_be_visible()
    tab.check_accessibility()
    expect(ask(page, "two").locator(".text")).to_have_text("The circle is red.")
    assert [body.get("system") for body in chat.bodies] == [None, "Answer in Latin.", "Answer in Latin."]

    page.get_by_role("button", name="New session").click()
    expect(field).to_have_value("Answer in Latin.")
    field.fill("")
    expect(ask(page, "three").locator(".text")).to_have_text("The circle is red.")
    assert "system" not in chat.bodies[-1]
    page.locator(".switch", has_text="one").click()
    expect(field).to_have_value("Answer in Latin.")


@pytest.mark.browser
def test_a_turn_is_copied_edited_and_asked_again_in_branches(chat: FakeChat, tab: Tab) -> None:
    """A branch has the turns before the question with their pictures; the session and the current draft stay."""
    page = tab.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
    give_files(page, picture_file("x.png"))
    turn = ask(page, "two")
    expect(turn.locator(".text")).to_have_text("The circle is red.")
    turn.get_by_role("button", name="Copy").click()
    expect(page.locator("#announcer")).to_contain_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == "The circle is red."
    origin = chat.received[-1].headers["x-amzn-sagemaker-session-id"]

    field = page.get_by_role("textbox", name="Your question")
    field.fill("typed meanwhile")
    turn.get_by_role("button", name="Another answer").click()
    expect(page.locator(".turn .text")).to_have_text(["The circle is red."] * 2)
    expect(page.locator(".switch")).to_have_count(2)
    branched, added, asked = chat.bodies[-3:]
    assert branched == {"type": "branch_session", "turns": 1}
    assert chat.received[-3].headers["x-amzn-sagemaker-session-id"] == origin
    assert (added["type"], len(added["images"]), asked["prompt_text"]) == ("add_images", 1, "two")
    assert chat.received[-1].headers["x-amzn-sagemaker-session-id"] != origin
    page.locator(".switch").last.click()
    expect(field).to_have_value("typed meanwhile")

    page.locator(".turn").last.get_by_role("button", name="Edit the question").click()
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.get_by_role("img", name="x.png")).to_be_visible()
    expect(field).to_have_value("two")
    expect(field).to_be_focused()
    tab.check_accessibility()
    expect(ask(page, "three").locator(".text")).to_have_text("The circle is red.")
    assert chat.asked() == ["one", "two", "two", "three"]
    page.locator(".switch").last.click()
    expect(page.locator('.turn [data-is="question"]')).to_have_text(["one", "two"])

    page.locator(".turn").first.get_by_role("button", name="Edit the question").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(ask(page, "four").locator(".text")).to_have_text("The circle is red.")
    assert chat.bodies[-2] == {"requestType": "NEW_SESSION"}


@pytest.mark.browser
def test_closed_sessions_release_their_pictures(chat: FakeChat, tab: Tab) -> None:
    """No picture stays in the page's memory when the session and its branch, which has copies of it, are closed."""
    page = tab.page
    expect(page.locator("#samples button")).to_have_count(2)  # the page keeps their pictures
    page.evaluate(
        """() => {
          const [make, release] = [URL.createObjectURL, URL.revokeObjectURL];
          window.held = new Set();
          URL.createObjectURL = (blob) => { const url = make(blob); held.add(url); return url; };
          URL.revokeObjectURL = (url) => { held.delete(url); release(url); };
        }"""
    )
    give_files(page, picture_file("first.png"))
    for question in ("one", "two"):
        expect(ask(page, question).locator(".tools")).to_be_visible()
    page.get_by_role("button", name="Edit the question").nth(1).click()
    expect(page.locator(".switch")).to_have_count(2)
    assert page.evaluate("held.size") > 1

    for _ in range(2):
        page.get_by_role("button", name=re.compile("^Close session")).first.click()
    expect(page.locator(".switch")).to_have_text([re.compile("New session")])

    assert page.evaluate("held.size") == 0


@pytest.mark.browser
def test_an_answers_markdown_is_shown_as_elements(chat: FakeChat, tab: Tab) -> None:
    """Lists, tables, code and links become elements; none loads a resource, and javascript: addresses become text."""
    page = tab.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.words = (
        "## Shapes\n\n1. a **red** circle\n2. `x < 1`\n\n",
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('<b>')\n```\n\n",
        "[site](https://example.com/a) [bad](javascript:alert(1)) [own](/chat) ![pic](https://example.com/p.png)\n\n",
        "<img src=x onerror=alert(1)> &amp; <b>bold</b>",
    )
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    text = ask(page, "Which shapes?").locator(".text")

    expect(text.get_by_role("heading", name="Shapes")).to_be_visible()
    expect(text.locator("ol > li")).to_have_text(["a red circle", "x < 1"])
    expect(text.locator("strong")).to_have_text("red")
    expect(text.locator("td")).to_have_text(["1", "2"])
    expect(text.locator("pre")).to_have_text("print('<b>')")
    expect(text.locator("a")).to_have_text(["site", "pic"])
    expect(text.locator("a").first).to_have_attribute("rel", "noopener noreferrer")
    expect(text).to_contain_text("<img src=x onerror=alert(1)> & <b>bold</b>")
    assert text.locator("img, script, b").count() == 0
    assert not [url for url in loaded if "example.com" in url]
    text.get_by_role("button", name="Copy the code").click()
    expect(page.locator("#announcer")).to_contain_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == "print('<b>')"
    tab.check_accessibility()


@pytest.mark.browser
def test_sessions_that_the_user_keeps_go_on_after_a_reload(chat: FakeChat, tab: Tab) -> None:
    """The browser stores nothing before the user agrees, and deletes everything when the user revokes that."""
    page = tab.page
    give_files(page, picture_file("x.png"))
    expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
    assert page.evaluate("indexedDB.databases()") == []
    keep_sessions(page)
    expect(ask(page, "two").locator(".text")).to_have_text("The circle is red.")
    wait_until(lambda: kept_values(page, "state").count("done") == 2, "the second turn is kept")
    session = chat.received[-1].headers["x-amzn-sagemaker-session-id"]

    page.reload()
    page.locator(".switch", has_text="one").click()
    expect(page.locator(".turn .text")).to_have_text(["The circle is red."] * 2)
    image = page.get_by_role("img", name="x.png")
    expect(image).to_be_visible()
    assert image.evaluate("(each) => each.naturalWidth") == 64
    tab.check_accessibility()
    assert {"type": "close_session"} not in chat.bodies
    expect(ask(page, "three").locator(".text")).to_have_text("The circle is red.")
    assert chat.received[-1].headers["x-amzn-sagemaker-session-id"] == session
    assert chat.num_opened == 1

    page.locator("#settings summary").click()
    page.get_by_label("Keep sessions in this browser").uncheck()
    expect(page.locator("#announcer")).to_contain_text("The kept sessions are deleted.")
    assert page.evaluate("indexedDB.databases()") == []
    assert page.evaluate("localStorage.length") == 0
    page.reload()
    expect(page.locator(".switch")).to_have_count(1)
    expect(page.locator(".switch")).to_contain_text("New session")


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "size"), [("dark", SMALL_PHONE), ("light", DESKTOP)])
def test_long_code_tables_and_the_settings_fit_every_screen(
    chat: FakeChat, browser: Browser, scheme: str, size: tuple[int, int]
) -> None:
    """Code and tables scroll by themselves; the question stays in sight above the open settings."""
    chat.words = ("```\n" + "long " * 60 + "\n```\n\n", "|" + "column |" * 30 + "\n|" + "---|" * 30 + "\n")
    with open_tab(browser, f"{chat.stage.proxy.runtime_url}/chat", scheme=scheme, size=size) as tab:
        page = tab.page
        turn = ask(page, "Show me a table.")
        expect(turn.locator("table")).to_be_visible()
        expect(turn.get_by_role("button", name="Another answer")).to_be_visible()
        page.locator("#settings summary").click()
        expect(page.get_by_label("System prompt")).to_be_visible()

        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        expect(page.get_by_role("textbox", name="Your question")).to_be_in_viewport()
        tab.check_accessibility()
        turn.get_by_role("button", name="Edit the question").click()
        expect(page.get_by_role("textbox", name="Your question")).to_have_value("Show me a table.")
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


@pytest.mark.browser
def test_a_session_is_exported(chat: FakeChat, tab: Tab) -> None:
    """The file is Markdown with questions, answers and the names of pictures."""
    page = tab.page
    give_files(page, picture_file("x.png"))
    expect(ask(page, "What colour?").locator(".text")).to_have_text("The circle is red.")
    page.locator("#settings summary").click()
    with page.expect_download() as started:
        page.get_by_role("button", name="Export this session").click()

    assert started.value.suggested_filename == "What-colour.md"
    written = Path(started.value.path()).read_text()
    assert written == (
        "# What colour?\n\nModel: llava\n\n## Question\n\nPicture: x.png\n\n> What colour?\n\n"
        "## Answer\n\nThe circle is red.\n"
    )


@pytest.mark.browser
def test_a_picture_is_enlarged(chat: FakeChat, tab: Tab) -> None:
    """The dialog closes with Escape, and the focus returns to the picture."""
    page = tab.page
    give_files(page, [picture_file("one.png", (640, 480))])
    expect(ask(page, "What is it?").locator(".text")).to_have_text("The circle is red.")
    small = page.get_by_role("button", name="Enlarge one.png")
    small.click()

    dialog = page.get_by_role("dialog", name="Picture")
    box = dialog.get_by_role("img", name="one.png").bounding_box()
    assert (box["width"], box["height"]) == (640, 480)
    tab.check_accessibility()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(small).to_be_focused()


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "other"), [("light", "Dark"), ("dark", "Light")])
def test_colours_are_switched(chat: FakeChat, browser: Browser, scheme: str, other: str) -> None:
    """The page begins with the system's scheme, and the button changes every colour."""
    with open_tab(browser, f"{chat.stage.proxy.runtime_url}/chat", scheme=scheme) as tab:
        page = tab.page
        expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
        colours = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        before = page.evaluate(colours)
        page.get_by_role("button", name=f"{other} colours").click()

        after = page.evaluate(colours)
        assert after[0] != before[0]
        assert after[1] != before[1]
        tab.check_accessibility()
        page.get_by_role("button", name=f"{scheme.title()} colours").click()
        assert page.evaluate(colours) == before


# What goes wrong


def waiting_at(gate: Gate) -> Any:
    """Return a behaviour that answers nothing before the gate opens."""

    async def behave(request: Received, wire: Wire) -> None:
        await gate.pass_through()

    return behave


def breaking(at: int) -> Callable[[Received, Wire], Any]:
    """Return a behaviour that sends a part of an answer and breaks off."""

    async def behave(request: Received, wire: Wire) -> None:
        await wire.begin_stream("application/jsonlines", RECEIPT)
        for line in lines(["The", " circle", " is"])[:at]:
            await wire.chunk(line)
        wire.reset()

    return behave


@pytest.mark.browser
def test_an_instance_lost_in_mid_stream_is_told_and_asked_again(chat: FakeChat, tab: Tab) -> None:
    """The retry has the same id, so that an answer that was recorded is not generated twice."""
    page = tab.page
    expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
    chat.instead = [breaking(2)]
    turn = ask(page, "two")

    expect(turn.locator(".notice")).to_have_text(["", re.compile("The instance was lost in the middle of the answer")])
    expect(turn.locator(".text")).to_have_text("The circle")
    expect(page.get_by_role("alert")).to_contain_text("lost")
    tab.check_accessibility()
    turn.get_by_role("button", name="Ask again").click()
    expect(turn.locator(".text")).to_have_text("The circle is red.")
    expect(turn.locator('[data-is="failure"]')).to_be_hidden()
    assert len({each.headers["amz-sdk-invocation-id"] for each in chat.received[-2:]}) == 1


@pytest.mark.browser
def test_a_failed_turn_keeps_its_button_and_is_asked_last(chat: FakeChat, tab: Tab) -> None:
    page = tab.page
    expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
    chat.instead = [breaking(2)]
    expect(ask(page, "two").get_by_role("button", name="Ask again")).to_be_visible()
    expect(ask(page, "three").locator(".text")).to_have_text("The circle is red.")
    broken = page.locator(".turn", has_text="two")

    broken.get_by_role("button", name="Ask again").click()

    expect(broken.locator(".text")).to_have_text("The circle is red.")
    expect(page.locator('.turn [data-is="question"]')).to_have_text(["one", "three", "two"])
    assert chat.asked() == ["one", "two", "three", "two"]


@pytest.mark.browser
def test_a_question_that_can_only_be_refused_is_edited(chat: FakeChat, browser: Browser) -> None:
    """After ContextTooLong the question returns for editing, because the same request would be refused again."""
    error = {"error": {"code": "ContextTooLong", "message": "The context has at most 80 tokens."}}
    refuse = answering(400, body=json.dumps(error).encode())
    with open_tab(browser, f"{chat.stage.proxy.runtime_url}/chat", refusals=("424",)) as tab:
        page = tab.page
        expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
        chat.instead = [refuse]
        turn = ask(page, "much too long")

        expect(turn).to_contain_text("The context has at most 80 tokens.")
        expect(turn.get_by_role("button", name="Ask again")).to_have_count(0)
        turn.get_by_role("button", name="Edit the question").click()
        expect(page.get_by_role("textbox", name="Your question")).to_have_value("much too long")
        expect(page.get_by_role("textbox", name="Your question")).to_be_focused()


@pytest.mark.browser
def test_a_session_that_moved_says_so(make_stage: MakeStage, browser: Browser) -> None:
    stage = make_stage(are_journaled=True)
    chat = FakeChat(stage)
    with open_tab(browser, f"{stage.proxy.runtime_url}/chat") as tab:
        expect(ask(tab.page, "one").locator(".text")).to_have_text("The circle is red.")
        home = stage.a if any("prompt_text" in json.loads(each.body) for each in stage.a.received) else stage.b
        other = "b" if home is stage.a else "a"
        stage.run(home.die())

        turn = ask(tab.page, "two")
        expect(turn.locator(".text")).to_have_text("The circle is red.")
        expect(turn).to_contain_text(f"The session moved from {home.name} to {other}, and continued there.")
        expect(turn.locator(".receipt")).to_contain_text("the session's own instance is not available")
        expect(tab.page.locator("#announcer")).to_contain_text(f"moved from {home.name} to {other}")
        assert chat.asked() == ["one", "two"]


@pytest.mark.browser
def test_overload_is_waited_out_where_one_can_see_it(chat: FakeChat, browser: Browser) -> None:
    """The page waits as long as Retry-After says and retries with the same id; stopping ends the wait."""
    url = f"{chat.stage.proxy.runtime_url}/chat"
    with open_tab(browser, url, refusals=("503",)) as tab:
        busy = refusing(429, "Overloaded", "all rows are taken", {"Retry-After": "1"})
        page = tab.page
        expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
        page.evaluate(WATCH)
        chat.instead = [busy]
        turn = ask(page, "two")
        expect(turn.locator(".text")).to_have_text("The circle is red.")
        assert any(re.search("all rows are taken. Trying again in 1 s", text) for text in page.evaluate("seen"))
        assert len({each.headers["amz-sdk-invocation-id"] for each in chat.received[-2:]}) == 1

        chat.instead = [refusing(429, "Overloaded", "all rows are taken", {"Retry-After": "30"})]
        turn = ask(page, "three")
        expect(turn).to_contain_text(re.compile(r"Trying again in \d+ s"))
        page.keyboard.press("Escape")
        expect(turn).to_contain_text("Stopped.")


@pytest.mark.browser
def test_a_lost_network_is_told_and_nothing_typed_is_lost(chat: FakeChat, browser: Browser) -> None:
    """The question stays and is sent again at the next press."""
    url = f"{chat.stage.proxy.runtime_url}/chat"
    with open_tab(browser, url, refusals=("ERR_INTERNET_DISCONNECTED",)) as tab:
        page = tab.page
        wait_ready(page)
        page.context.set_offline(True)
        expect(page.locator("#composer-notice")).to_contain_text("The network is down")
        turn = ask(page, "one")
        expect(turn).to_contain_text("The server cannot be reached. Check the network")
        page.context.set_offline(False)

        turn.get_by_role("button", name="Ask again").click()
        expect(turn.locator(".text")).to_have_text("The circle is red.")


@pytest.mark.browser
def test_a_picture_that_the_server_refuses_comes_back(chat: FakeChat, browser: Browser) -> None:
    """The picture returns with the question, so that the question can be sent without it."""
    url = f"{chat.stage.proxy.runtime_url}/chat"
    with open_tab(browser, url, refusals=("424",)) as tab:
        page = tab.page
        chat.instead = [refusing(415, "NotAnImage", "this is not an image")]
        give_files(page, picture_file("odd.png"))
        page.get_by_role("textbox", name="Your question").fill("What is it?")
        page.keyboard.press("Enter")
        expect(page.locator("#composer-notice")).to_contain_text("refused: this is not an image")
        expect(page.get_by_role("textbox", name="Your question")).to_have_value("What is it?")
        page.get_by_role("button", name="Remove odd.png").click()
        submit_question(page)

        expect(page.locator(".turn .text")).to_have_text("The circle is red.")
        assert "images" not in chat.bodies[1]


@pytest.mark.browser
def test_expiry_is_counted_down_and_mended_by_one_press(chat: FakeChat, browser: Browser) -> None:
    """The page announces the expiry and opens the session again with its pictures afterwards.

    It says what the new session has forgotten. A question that meets the expiry is asked in the new session.
    """
    url = f"{chat.stage.proxy.runtime_url}/chat"
    with open_tab(browser, url, refusals=("400",)) as tab:
        page = tab.page
        page.clock.install()
        chat.expires_in_s = 100
        give_files(page, picture_file("x.png"))
        expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
        expect(page.locator("#expiry")).to_have_text(re.compile(r"This session expires in (2 min|\d\d s)\."))
        page.clock.fast_forward(1100)
        expect(page.locator("#announcer")).to_contain_text(re.compile("This session expires in"))
        expect(page.locator("#expiry.soon")).to_be_visible()
        page.clock.fast_forward(101_000)
        expect(page.locator("#log > .notice.warn")).to_contain_text("This session has expired.")
        tab.check_accessibility()
        chat.expires_in_s = 3600
        page.get_by_role("button", name="Open it again with the same pictures").click()
        expect(page.locator("#log > .notice")).to_have_text(
            re.compile("Opened again. The model has the pictures, but not")
        )
        assert [image.size for image in images_of(chat.bodies[-1])] == [(64, 48)]
        expect(ask(page, "two").locator(".text")).to_have_text("The circle is red.")

        chat.instead = [refusing(410, "SessionExpired", "this session has expired; open a new one")]
        turn = ask(page, "three")
        expect(turn).to_contain_text("this session has expired; open a new one")
        turn.get_by_role("button", name="Open it again with the same pictures").click()
        expect(turn.locator(".text")).to_have_text("The circle is red.")
        assert (chat.num_opened, chat.asked()) == (3, ["one", "two", "three", "three"])


@pytest.mark.browser
def test_a_wrong_token_leads_to_a_field_for_the_right_one(make_stage: MakeStage, browser: Browser) -> None:
    """The page asks for a token when it opens, and again if the token is wrong; it stores none in the browser."""
    stage = make_stage(credentials=Credentials(tokens={"alice": "a-token-of-alice", "bob": "a-token-of-bobby"}))
    chat = FakeChat(stage)
    with open_tab(browser, f"{stage.proxy.runtime_url}/chat", refusals=("403", "400")) as tab:
        page = tab.page
        dialog = page.get_by_role("dialog", name="Access token")
        expect(dialog).to_contain_text("Missing Authentication Token")
        tab.check_accessibility()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        page.get_by_role("button", name="Access token").click()
        for token, said in (("not-a-token-at-all", "security token"), ("a-token-of-alice", "")):
            dialog.get_by_label("Token").fill(token)
            page.keyboard.press("Enter")
            if said:
                expect(dialog).to_contain_text(re.compile(said, re.IGNORECASE))
        expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]

        page.get_by_role("button", name="Access token").click()
        dialog.get_by_label("Token").fill("a-token-of-bobby")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()  # the token is in use from then on
        turn = ask(page, "two")  # another caller, who does not own this session
        turn.get_by_role("button", name="Open it again").click()
        expect(turn.locator(".text")).to_have_text("The circle is red.")
        assert chat.num_opened == 2


# Accessibility


@pytest.mark.browser
def test_keyboard_is_enough(chat: FakeChat, tab: Tab) -> None:
    """A session can be used from opening to closing without a pointer."""
    page = tab.page
    expect(page.locator("#samples button")).to_have_count(2)

    def tab_to(name: str) -> None:
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent").startswith(name):
                return
        pytest.fail(f"no way to {name}")

    tab_to("Skip to the question")
    tab_to("Take a yellow star")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="What is this?")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".turn .text")).to_have_text("The circle is red.")
    page.keyboard.type("And more?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two lines.")
    submit_question(page)
    expect(page.locator(".turn .text")).to_have_text(["The circle is red."] * 2)
    assert chat.asked()[-1] == "And more?\nTwo lines."
    tab_to("Skip")
    tab_to("Close session")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("New session")


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "size"), [("light", SMALL_PHONE), ("dark", DESKTOP)])
def test_any_light_a_small_phone_and_both_directions(
    chat: FakeChat, browser: Browser, scheme: str, size: tuple[int, int]
) -> None:
    """Nothing is wider than the screen, receipts are folded on a narrow one, and axe-core reports nothing."""
    with open_tab(browser, f"{chat.stage.proxy.runtime_url}/chat", scheme=scheme, size=size) as tab:
        page = tab.page
        page.emulate_media(reduced_motion="reduce")
        give_files(page, [picture_file("one.png"), picture_file("two.png")])
        expect(ask(page, "What color is the circle?").locator(".text")).to_have_text("The circle is red.")
        chat.instead = [breaking(1)]
        expect(ask(page, "Averylongword" * 12).get_by_role("button", name="Ask again")).to_be_visible()
        page.get_by_role("button", name="New session").click()
        page.locator(".switch", has_text="What color").click()
        is_open = page.locator(".turn").first.locator(".receipt").evaluate("(each) => each.open")
        assert not is_open
        for direction in ("ltr", "rtl"):
            page.evaluate("(direction) => (document.documentElement.dir = direction)", direction)
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
            tab.check_accessibility()


@pytest.mark.browser
def test_one_of_several_endpoints_is_chosen(make_stage: MakeStage, browser: Browser) -> None:
    """A new session uses the selected model; existing sessions keep theirs."""
    stage = make_stage(endpoints={"a": "llava", "b": "llm"})
    chat = FakeChat(stage)
    with open_tab(browser, f"{stage.proxy.runtime_url}/chat") as tab:
        page = tab.page
        expect(ask(page, "one").locator(".receipt summary")).to_contain_text("a ·")
        page.get_by_label("Model", exact=True).select_option("llm")
        expect(ask(page, "two").locator(".receipt summary")).to_contain_text("b ·")
        tab.check_accessibility()
        page.locator(".switch", has_text="one").click()
        expect(page.get_by_label("Model", exact=True)).to_have_value("llava")
        assert chat.num_opened == 2


@pytest.mark.browser
def test_a_phone_with_two_endpoints_does_not_scroll_sideways(make_stage: MakeStage, browser: Browser) -> None:
    """The page is not wider than the screen, however long an endpoint's name is."""
    long = "a-text-model-whose-name-has-fifty-eight-letters-and-digits"
    stage = make_stage(endpoints={"a": "llava", "b": long})
    FakeChat(stage)
    with open_tab(browser, f"{stage.proxy.runtime_url}/chat", size=SMALL_PHONE) as tab:
        wait_ready(tab.page)
        for name in (long, "llava"):
            tab.page.get_by_label("Model", exact=True).select_option(name)
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= SMALL_PHONE[0]
            assert tab.page.evaluate("scrollX") == 0
        tab.check_accessibility()


@pytest.mark.browser
def test_a_text_model_has_no_picture_parts(make_stage: MakeStage, browser: Browser) -> None:
    """Neither a button nor samples, and a dropped picture is refused with the reason; the other model has them."""
    stage = make_stage(endpoints={"a": "llava", "b": "llm"})
    FakeChat(stage)
    for name, can_see in (("a", True), ("b", False)):
        stage.instances[name].on_status = answering(body=status_with(can_see))
        found = stage.registry.find(name)
        found.take_status(ReportedStatus(can_see=can_see))
    with open_tab(browser, f"{stage.proxy.runtime_url}/chat") as tab:
        page = tab.page
        wait_ready(page)
        expect(page.locator("#samples button")).to_have_count(2)
        give_files(page, [picture_file("one.png")])
        expect(page.locator("#pending img")).to_have_count(1)

        page.get_by_label("Model", exact=True).select_option("llm")
        expect(page.get_by_role("heading", name="Ask a model", exact=True)).to_be_visible()
        expect(page.locator("#composer-notice")).to_contain_text("reads no pictures")
        expect(page.locator("#pending img")).to_have_count(0)
        expect(page.get_by_role("button", name="Add pictures")).to_be_hidden()
        expect(page.locator("#samples")).to_be_hidden()
        give_files(page, [picture_file("two.png")])
        expect(page.locator("#pending img")).to_have_count(0)
        tab.check_accessibility()
        expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")

        page.get_by_label("Model", exact=True).select_option("llava")
        expect(page.get_by_role("button", name="Add pictures")).to_be_visible()
        expect(page.locator("#samples button").first).to_be_visible()


def test_list_of_endpoints_has_no_instance_asked_whose_handler_may_be_another_makers(stage: Stage) -> None:
    """An instance of an unknown handler is not asked, because it would answer with an invocation.

    The launcher knows its own.
    """
    [variant] = stage.registry.get_endpoint("llava").variants
    url = f"{stage.proxy.runtime_url}/chat/endpoints"
    assert requests.get(url, timeout=60).status_code == 200
    assert not variant.needs_status

    stage.instance("a").started_at = 1.0
    stage.instance("a").takes_operations = False
    assert requests.get(url, timeout=60).status_code == 200
    assert not variant.needs_status

    stage.instance("a").takes_operations = True
    assert requests.get(url, timeout=60).status_code == 200
    assert variant.needs_status


def status_with(can_see: bool | None) -> bytes:
    """Return an instance's answer to the status operation."""
    capabilities = {} if can_see is None else {"capabilities": {"can_see": can_see}}
    return json.dumps({"sessions": {"max": 100, "open": 0}, **capabilities}).encode()


@pytest.mark.browser
def test_capabilities_that_are_reported_late_are_learnt(make_stage: MakeStage, browser: Browser) -> None:
    """The page is opened before an instance has reported; the next session knows."""
    stage = make_stage(health=NO_PROBES.replace(status_interval_s=0.05))
    FakeChat(stage)
    for fake in stage.instances.values():
        fake.on_status = answering(body=status_with(None))
    with open_tab(browser, f"{stage.proxy.runtime_url}/chat") as tab:
        page = tab.page
        expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
        expect(page.get_by_role("button", name="Add pictures")).to_be_visible()
        for fake in stage.instances.values():
            fake.on_status = answering(body=status_with(False))
        page.get_by_role("button", name="New session").click()
        expect(page.get_by_role("button", name="Add pictures")).to_be_hidden()


@pytest.mark.browser
def test_a_kept_question_is_asked_again_with_its_picture(chat: FakeChat, browser: Browser) -> None:
    """A picture that the server did not get is sent after a reload, before its question is asked again."""
    url = f"{chat.stage.proxy.runtime_url}/chat"
    with open_tab(browser, url, refusals=("ERR_INTERNET_DISCONNECTED",)) as tab:
        page = tab.page
        wait_ready(page)
        keep_sessions(page)
        expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
        give_files(page, picture_file("x.png"))
        expect(page.get_by_role("button", name="Remove x.png")).to_be_visible()
        page.context.set_offline(True)
        expect(ask(page, "two")).to_contain_text("The server cannot be reached")
        wait_until(lambda: "failed" in kept_values(page, "state"), "the failed turn is kept")
        page.context.set_offline(False)

        page.reload()
        page.locator(".switch", has_text="one").click()
        turn = page.locator(".turn").nth(1)
        turn.get_by_role("button", name="Ask again").click()

        expect(turn.locator(".text")).to_have_text("The circle is red.")
        assert [image.size for image in images_of(chat.bodies[-2])] == [(64, 48)]
        assert chat.asked() == ["one", "two"]


@pytest.mark.browser
def test_a_kept_branch_still_begins_with_its_turns(chat: FakeChat, browser: Browser) -> None:
    """A branch that was not open at the server before a reload is opened as a branch after it."""
    url = f"{chat.stage.proxy.runtime_url}/chat"
    with open_tab(browser, url, refusals=("ERR_INTERNET_DISCONNECTED",)) as tab:
        page = tab.page
        give_files(page, picture_file("x.png"))
        keep_sessions(page)
        expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
        expect(ask(page, "two").locator(".text")).to_have_text("The circle is red.")
        page.locator(".turn").nth(1).get_by_role("button", name="Edit").click()
        expect(page.get_by_role("textbox", name="Your question")).to_have_value("two")
        page.context.set_offline(True)
        expect(ask(page, "other")).to_contain_text("The server cannot be reached")
        wait_until(lambda: "failed" in kept_values(page, "state"), "the failed turn is kept")
        page.context.set_offline(False)

        page.reload()
        page.locator(".switch").filter(has_text="branch").click()
        turn = page.locator(".turn").nth(1)
        turn.get_by_role("button", name="Ask again").click()

        expect(turn.locator(".text")).to_have_text("The circle is red.")
        assert chat.bodies[-2] == {"type": "branch_session", "turns": 1}
        assert chat.asked() == ["one", "two", "other"]


@pytest.mark.browser
@pytest.mark.parametrize("has_picture", [True, False], ids=["with a picture", "without"])
def test_an_opening_that_a_reload_interrupts_is_sent_again_as_the_same_request(
    chat: FakeChat, tab: Tab, has_picture: bool
) -> None:
    """The server may have opened the session meanwhile; another request would open a second one."""
    page = tab.page
    keep_sessions(page)
    if has_picture:
        give_files(page, picture_file("x.png"))
        expect(page.get_by_role("button", name="Remove x.png")).to_be_visible()
    gate = Gate()
    chat.instead = [waiting_at(gate)]
    ask(page, "one")
    wait_until(lambda: len(chat.received) == 1, "the session is being opened")
    wait_until(lambda: kept_values(page, "state") == ["stopped"], "the turn is kept")

    page.reload()
    gate.open()
    page.locator(".switch", has_text="one").click()
    turn = page.locator(".turn").first
    turn.get_by_role("button", name="Ask again").click()

    expect(turn.locator(".text")).to_have_text("The circle is red.")
    first, again = chat.received[:2]
    assert first.body == again.body
    assert first.headers["amz-sdk-invocation-id"] == again.headers["amz-sdk-invocation-id"]


@pytest.mark.browser
def test_tabs_with_one_kept_session_keep_the_turns_of_both(chat: FakeChat, tab: Tab) -> None:
    """Each tab keeps the turns that it asked; a tab that gets the focus shows those of the other, too."""
    first = tab.page
    keep_sessions(first)
    expect(ask(first, "one").locator(".text")).to_have_text("The circle is red.")
    wait_until(lambda: kept_values(first, "state").count("done") == 1, "the first turn is kept")
    second = open_second(first, "one")
    chat.gate = Gate()
    running = ask(first, "two")
    expect(running.locator(".text")).to_have_text("The")
    expect(ask(second, "three")).to_contain_text("The")
    chat.gate.open()
    expect(running.locator(".text")).to_have_text("The circle is red.")
    expect(second.locator(".turn .text")).to_have_text(["The circle is red."] * 2)
    wait_until(lambda: kept_values(first, "state").count("done") == 3, "the turns of both tabs are kept")

    for page in (first, second):
        page.evaluate("dispatchEvent(new Event('focus'))")
        expect(page.locator(".turn .question")).to_contain_text(["one", "two", "three"])
        expect(page.locator(".turn .text")).to_have_text(["The circle is red."] * 3)


@pytest.mark.browser
def test_a_session_that_finds_no_room_in_the_browser_is_told(chat: FakeChat, tab: Tab) -> None:
    """A browser may refuse a record only when it writes the transaction, after the record's own success."""
    page = tab.page
    keep_sessions(page)
    page.evaluate(
        """() => {
          const put = IDBObjectStore.prototype.put;
          IDBObjectStore.prototype.put = function (...given) {
            const request = put.apply(this, given);
            request.addEventListener("success", () => this.transaction.abort());
            return request;
          };
        }"""
    )

    expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")

    expect(page.locator("#composer-notice")).to_contain_text("This browser does not keep the session")


@pytest.mark.browser
def test_sessions_are_kept_again_once_the_browser_can(chat: FakeChat, tab: Tab) -> None:
    """A database that could not be opened once is opened for the next turn, and can be deleted."""
    page = tab.page
    page.evaluate(
        """() => new Promise((resolve) => {
          const request = indexedDB.open("torchmoor-chat", 2);  // as of a later version of the page
          request.onsuccess = () => resolve(request.result.close());
        })"""
    )
    keep_sessions(page)
    expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
    expect(page.locator("#composer-notice")).to_contain_text("This browser does not keep the session")
    page.evaluate(
        """() => new Promise((resolve) => {
          indexedDB.deleteDatabase("torchmoor-chat").onsuccess = () => resolve();
        })"""
    )

    expect(ask(page, "two").locator(".text")).to_have_text("The circle is red.")

    wait_until(lambda: kept_values(page, "state").count("done") == 2, "both turns are kept")


@pytest.mark.browser
def test_sessions_are_kept_again_after_the_browsers_storage_was_cleared(chat: FakeChat, tab: Tab) -> None:
    """The user may delete what the browser stores for the page while the page is open."""
    page = tab.page
    keep_sessions(page)
    expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
    wait_until(lambda: kept_values(page, "state").count("done") == 1, "the turn is kept")
    origin = {"origin": page.evaluate("location.origin"), "storageTypes": "indexeddb"}
    page.context.new_cdp_session(page).send("Storage.clearDataForOrigin", origin)

    expect(ask(page, "two").locator(".text")).to_have_text("The circle is red.")

    wait_until(lambda: kept_values(page, "state").count("done") == 2, "both turns are kept again")


@pytest.mark.browser
def test_a_session_that_is_closed_while_it_opens_again_stays_closed(chat: FakeChat, browser: Browser) -> None:
    """A question that waited for the session is not asked then, and no other session is opened for it."""
    url = f"{chat.stage.proxy.runtime_url}/chat"
    with open_tab(browser, url, refusals=("400",)) as tab:
        page = tab.page
        expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
        chat.instead = [refusing(410, "SessionExpired", "this session has expired; open a new one")]
        expect(ask(page, "two")).to_contain_text("this session has expired")
        gate = Gate()
        chat.instead = [waiting_at(gate)]
        page.get_by_role("textbox", name="Your question").fill("three")
        submit_question(page)
        wait_until(lambda: len(chat.received) == 4, "the session is being opened again")

        page.get_by_role("button", name="Close session: one").click()
        expect(page.locator(".switch")).to_contain_text("New session")
        expect(ask(page, "four").locator(".text")).to_have_text("The circle is red.")

        gate.open()
        assert (chat.num_opened, chat.asked()) == (2, ["one", "two", "four"])


@pytest.mark.browser
def test_a_line_with_empty_details_does_not_end_an_answer(chat: FakeChat, tab: Tab) -> None:
    """A handler in the form of Text Generation Inference has null for what only the last line knows."""

    async def behave(request: Received, wire: Wire) -> None:
        await wire.begin_stream("application/jsonlines")
        await wire.chunk(b'{"token": {"text": "The"}, "generated_text": null, "details": null}\n')
        await wire.chunk(b"")

    expect(ask(tab.page, "one").locator(".text")).to_have_text("The circle is red.")
    chat.instead = [behave]

    expect(ask(tab.page, "two")).to_contain_text("The answer ended before it was complete.")


@pytest.mark.browser
def test_escape_of_an_input_method_does_not_stop_the_answer(chat: FakeChat, tab: Tab) -> None:
    """Who writes Chinese, Japanese or Korean presses Escape to discard the characters that are being composed."""
    chat.gate = gate = Gate()
    turn = ask(tab.page, "one")
    expect(turn.locator(".text")).to_have_text("The")

    tab.page.evaluate(
        """() => document.querySelector("#question").dispatchEvent(
          new KeyboardEvent("keydown", { key: "Escape", isComposing: true, bubbles: true })
        )"""
    )
    gate.open()

    expect(turn.locator(".text")).to_have_text("The circle is red.")
    assert {"type": "stop_answer"} not in chat.bodies


@pytest.mark.browser
def test_a_browser_that_stores_nothing_does_not_seem_to_keep_sessions(chat: FakeChat, tab: Tab) -> None:
    """The checkbox shows whether sessions are kept, also if the browser forbids it or has no room."""
    page = tab.page
    page.evaluate(
        "() => { Storage.prototype.setItem = () => { throw new DOMException('no room', 'QuotaExceededError'); }; }"
    )
    page.locator("#settings summary").click()

    page.get_by_label("Keep sessions in this browser").click()

    expect(page.locator("#composer-notice")).to_contain_text("This browser does not keep the session: no room")
    expect(page.get_by_label("Keep sessions in this browser")).not_to_be_checked()


@pytest.mark.browser
def test_the_page_works_in_a_browser_that_stores_nothing(chat: FakeChat, tab: Tab) -> None:
    """Firefox without cookies refuses the page both its storage and the channel to other tabs."""
    page = tab.page
    page.add_init_script(
        """const refuse = () => { throw new DOMException("The operation is insecure.", "SecurityError"); };
        Object.defineProperty(window, "localStorage", { get: refuse });
        window.BroadcastChannel = class { constructor() { refuse(); } };"""
    )
    page.reload()

    expect(ask(page, "one").locator(".text")).to_have_text("The circle is red.")
    page.get_by_role("button", name="Close session: one").click()
    expect(page.locator("#title")).to_have_text("New session")
    wait_until(lambda: {"type": "close_session"} in chat.bodies, "the closing of the session")


@pytest.mark.browser
def test_a_session_that_is_closed_in_one_tab_closes_in_the_others(chat: FakeChat, tab: Tab) -> None:
    """The other tab stops showing it, does not store it again, and sends the server no second close.

    A question that is being typed there moves to a new session.
    """
    first = tab.page
    keep_sessions(first)
    for question in ("one", "two"):
        first.locator("#new-session").click()
        expect(ask(first, question).locator(".text")).to_have_text("The circle is red.")
    wait_until(lambda: len(kept_values(first, "state")) == 2, "both sessions are kept")
    second = open_second(first, "one")
    second.get_by_role("textbox", name="Your question").fill("half a que")

    first.get_by_role("button", name="Close session: one").click()

    expect(second.get_by_role("button", name="Close session: one")).to_have_count(0)
    expect(second.locator("#announcer")).to_contain_text("Closed in another tab: one")
    expect(second.get_by_role("textbox", name="Your question")).to_be_focused()
    expect(second.get_by_role("textbox", name="Your question")).to_have_value("half a que")
    expect(second.locator("#title")).to_have_text("New session")
    second.evaluate("dispatchEvent(new Event('focus'))")
    expect(second.locator(".switch", has_text="two")).to_have_count(1)
    wait_until(lambda: kept_values(first, "question") == ["two"], "the closed session is not kept")
    wait_until(lambda: {"type": "close_session"} in chat.bodies, "the closing of the session")
    assert chat.bodies.count({"type": "close_session"}) == 1


@pytest.mark.browser
def test_a_turn_that_another_tab_is_answering_is_not_shown_as_stopped(chat: FakeChat, tab: Tab) -> None:
    """If the user asks again there, the same request is sent, whose answer the server may have recorded."""
    first = tab.page
    keep_sessions(first)
    chat.gate = gate = Gate()
    expect(ask(first, "one").locator(".text")).to_have_text("The")
    wait_until(lambda: kept_values(first, "state") == ["stopped"], "the turn is kept")
    second = open_second(first, "one")
    turn = second.locator(".turn").first

    expect(turn.locator("[data-is=state]")).to_contain_text("Another tab may show the rest")
    gate.open()
    expect(first.locator(".turn .text")).to_have_text("The circle is red.")
    turn.get_by_role("button", name="Ask again").click()

    expect(turn.locator(".text")).to_have_text("The circle is red.")
    questions = [each for each in chat.received if json.loads(each.body).get("prompt_text") == "one"]
    assert len(questions) == 2
    assert len({each.headers["amz-sdk-invocation-id"] for each in questions}) == 1


@pytest.mark.browser
def test_a_picture_that_another_tab_is_sending_is_not_kept_as_sent(chat: FakeChat, tab: Tab) -> None:
    """If that tab is reloaded meanwhile, it sends the picture again as the same request."""
    first = tab.page
    keep_sessions(first)
    expect(ask(first, "one").locator(".text")).to_have_text("The circle is red.")
    wait_until(lambda: kept_values(first, "state").count("done") == 1, "the first turn is kept")
    second = open_second(first, "one")
    chat.gate = gate = Gate()
    expect(ask(second, "two").locator(".text")).to_have_text("The")
    late = Gate()
    chat.instead = [waiting_at(late)]
    give_files(first, picture_file("x.png"))
    expect(first.get_by_role("button", name="Remove x.png")).to_be_visible()
    ask(first, "three")
    wait_until(lambda: chat.bodies[-1]["type"] == "add_images", "the picture is being sent")
    wait_until(lambda: "three" in kept_values(first, "question"), "the question is kept")
    gate.open()
    expect(second.locator(".turn .text").nth(1)).to_have_text("The circle is red.")
    wait_until(lambda: kept_values(first, "state").count("done") == 2, "the turn of the second tab is kept")

    first.reload()
    late.open()
    first.locator(".switch", has_text="one").click()
    turn = first.locator(".turn").filter(has_text="three")
    turn.get_by_role("button", name="Ask again").click()

    expect(turn.locator(".text")).to_have_text("The circle is red.")
    sent = [each for each in chat.received if json.loads(each.body).get("type") == "add_images"]
    assert len(sent) == 2
    assert len({each.headers["amz-sdk-invocation-id"] for each in sent}) == 1
    assert len({each.body for each in sent}) == 1


@pytest.mark.browser
def test_text_from_an_office_program_is_pasted_as_text(chat: FakeChat, tab: Tab) -> None:
    """Such programs put a picture of the text beside it on the clipboard."""
    page, data = tab.page, base64.b64encode(picture_file("x.png")["buffer"]).decode()
    is_taken = page.evaluate(
        """([data]) => {
          const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
          const files = new DataTransfer();
          files.setData("text/plain", "a cell");
          files.setData("text/html", "<td>a cell</td>");
          files.items.add(new File([bytes], "image.png", { type: "image/png" }));
          const event = new ClipboardEvent("paste", { bubbles: true, cancelable: true, clipboardData: files });
          return !document.querySelector("#question").dispatchEvent(event);
        }""",
        [data],
    )
    give_files(page, picture_file("y.png"))

    expect(page.locator("#pending img")).to_have_count(1)
    assert not is_taken


@pytest.mark.browser
def test_enter_that_ends_a_composition_in_safari_does_not_send(chat: FakeChat, tab: Tab) -> None:
    """Safari ends the composition before it reports the key, whose code is 229."""
    page = tab.page
    page.get_by_role("textbox", name="Your question").fill("一")
    page.evaluate(
        """() => document.querySelector("#question").dispatchEvent(
          new KeyboardEvent("keydown", { key: "Enter", keyCode: 229, bubbles: true, cancelable: true })
        )"""
    )
    page.get_by_role("textbox", name="Your question").fill("一二")
    submit_question(page)

    expect(page.locator(".turn .text")).to_have_text("The circle is red.")
    assert chat.asked() == ["一二"]


@pytest.mark.browser
def test_the_title_of_a_session_is_the_first_line_of_its_question(chat: FakeChat, tab: Tab) -> None:
    """A long text after it is not read aloud with each button, and does not break the heading of an export."""
    page = tab.page
    expect(ask(page, "Explain this:\n" + "code " * 400).locator(".text")).to_have_text("The circle is red.")

    expect(page.get_by_role("button", name="Close session: Explain this:", exact=True)).to_be_visible()
    expect(page).to_have_title("Explain this: \u2013 torchmoor chat")
    page.get_by_role("button", name="New session").click()
    ask(page, "long " * 100)
    expect(page.get_by_role("button", name=f"Close session: {'long ' * 20}…", exact=True)).to_be_visible()
