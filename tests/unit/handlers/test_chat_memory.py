"""Many conversations on little memory: sharing, eviction, and right answers for all."""

import base64
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from handlers.chat.images.loader import ImageLoader
from handlers.chat.sessions import recorder
from handlers.chat.sessions.session_images import SessionImages
from handlers.chat.sessions.store import SessionStore
from handlers.journal.directory import DirectoryJournal
from handlers.settings.journal import JournalSettings
from tests.torchserve.drawings import draw_image, encoded
from tests.unit.handlers.conftest import DEMO, Reference
from tests.unit.handlers.test_chat_service import (
    NUM,
    SHORT,
    Hold,
    data_url,
    features_bytes,
    holds_nothing,
    kv_bytes,
    question,
    reply_of,
    settled,
)
from tests.waiting import wait_until

COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "black", "gray")
SHARED = 48  # positions: whole blocks in an image and the text before it


def tier(exchange: Any) -> str:
    assert exchange.status == 200, exchange.body
    return exchange.headers["x-torchmoor-cache-tier"]


def prefilled(exchange: Any) -> int:
    return int(exchange.headers["x-torchmoor-prefill-tokens"])


def num_tokens(exchange: Any) -> int:
    return int(exchange.headers["x-torchmoor-context-tokens"])


@pytest.fixture
def pictures() -> list[Image.Image]:
    """Return eight different images."""
    return [draw_image("ellipse" if i % 2 else "rectangle", colour) for i, colour in enumerate(COLOURS)]


# Sharing


def test_sessions_on_one_image_share_its_features_and_blocks(client: Any, reference: Any, red: Any) -> None:
    """An image is encoded once; the second session's question computes and stores only what follows it."""
    pool = client.pool
    first, second = client.open(data_url(red)), client.open(data_url(red))
    one = client.ask(first, "what is the shape?", **SHORT).wait()
    num_used = pool.num_used

    two = client.ask(second, "what colour is it?", **SHORT).wait()

    assert prefilled(one) == num_tokens(one)
    assert prefilled(two) == num_tokens(two) - SHARED
    assert pool.num_used - num_used < num_used
    assert settled(client)["images"] == {"received": 2, "fetched": 0, "encoded": 1, "shared": 1, "demoted": 0}
    assert one.json["response_text"] == reference([question("what is the shape?", 1)], [red], NUM)
    assert two.json["response_text"] == reference([question("what colour is it?", 1)], [red], NUM)


@pytest.mark.parametrize(
    ("form", "options"), [("PNG", {"compress_level": 0}), ("BMP", {}), ("WEBP", {"lossless": True}), ("TIFF", {})]
)
def test_another_encoding_of_the_image_shares_too(client: Any, red: Any, form: str, options: Any) -> None:
    """Images are compared by their pixels."""
    client.answer(client.open(data_url(red)), "what is it?", **SHORT)

    other = client.open(base64.b64encode(encoded(red, form, **options)).decode())

    asked = client.ask(other, "what is it?", **SHORT).wait()
    assert prefilled(asked) < num_tokens(asked) - SHARED + 1
    assert settled(client)["images"]["encoded"] == 1


def test_a_lossy_copy_is_another_image(client: Any, reference: Any, red: Any) -> None:
    """A single different pixel makes another image."""
    altered = red.copy()
    altered.putpixel((0, 0), (254, 255, 255))
    first = client.answer(client.open(data_url(red)), "what is it?", **SHORT)
    second = client.answer(client.open(data_url(altered)), "what is it?", **SHORT)

    assert settled(client)["images"]["encoded"] == 2
    assert first == reference([question("what is it?", 1)], [red], NUM)
    assert second == reference([question("what is it?", 1)], [altered], NUM)


def test_callers_share_nothing(client: Any, red: Any) -> None:
    """Another principal's or endpoint's image makes nothing faster or cheaper."""
    callers = [
        {"x-torchmoor-endpoint": endpoint, "x-torchmoor-principal": principal}
        for endpoint, principal in (("e", "alice"), ("e", "bob"), ("f", "alice"))
    ]
    for number, caller in enumerate(callers):
        sid = client.call({"type": "start_session", "image": data_url(red)}, caller).json["session_id"]
        asked = client.ask(sid, "what is it?", headers=caller, **SHORT).wait()
        assert prefilled(asked) == num_tokens(asked)
        assert settled(client)["images"]["encoded"] == number + 1


def test_closing_one_leaves_the_other_right(client: Any, reference: Any, red: Any) -> None:
    """Blocks that two sessions share stay until both are closed."""
    first, second = client.open(data_url(red)), client.open(data_url(red))
    said = client.answer(second, "what is it?", **SHORT)
    client.answer(first, "what is it?", **SHORT)

    client.call({"type": "close_session", "session_id": first})
    again = client.ask(second, "what colour is it?", **SHORT).wait()

    messages = [question("what is it?", 1), reply_of(said), question("what colour is it?")]
    assert tier(again) == "kv"
    assert again.json["response_text"] == reference(messages, [red], NUM)
    client.call({"type": "close_session", "session_id": second})
    assert holds_nothing(client)


def test_same_words_about_different_images_do_not_mix(client: Any, reference: Any, pictures: Any) -> None:
    """Equal conversations about different images are answered about their own."""
    sids = [client.open(data_url(picture)) for picture in pictures]
    expected = [reference([question("what colour is it?", 1)], [picture], NUM) for picture in pictures]
    assert len(set(expected)) > 1

    for _ in range(2):
        asked = [client.ask(client.open(data_url(p)), "what colour is it?", **SHORT) for p in pictures]
        assert [exchange.wait().json["response_text"] for exchange in asked] == expected
    assert [client.answer(sid, "what colour is it?", **SHORT) for sid in sids] == expected
    assert settled(client)["images"]["encoded"] == len(pictures)


# Tiers


def test_features_that_were_given_up_are_computed_from_the_host(
    make_client: Any, tiny_llava: Any, reference: Any, red: Any, blue: Any
) -> None:
    """With memory for one image and one conversation, a session is restored from its encoded image."""
    client = make_client(session={"kv_bytes": kv_bytes(tiny_llava, 112), "features_bytes": features_bytes(tiny_llava)})
    first, second = client.open(data_url(red)), client.open(data_url(blue))
    one = client.ask(first, "what is it?", **SHORT).wait()
    two = client.ask(second, "what is it?", **SHORT).wait()

    again = client.ask(first, "which colour?", **SHORT).wait()

    assert [tier(exchange) for exchange in (one, two, again)] == ["encoded", "encoded", "encoded"]
    said = one.json["response_text"]
    messages = [question("what is it?", 1), reply_of(said), question("which colour?")]
    assert said == reference(messages[:1], [red], NUM)
    assert again.json["response_text"] == reference(messages, [red], NUM)
    assert settled(client)["images"]["demoted"] == 4


def test_bytes_that_were_given_up_come_from_the_journal(
    make_client: Any, tiny_llava: Any, tmp_path: Path, reference: Any, red: Any, blue: Any
) -> None:
    """With a full host as well, a session is restored from its journal."""
    client = make_client(
        journal=DirectoryJournal(tmp_path / "journal", JournalSettings()),
        session={
            "kv_bytes": kv_bytes(tiny_llava, 112),
            "features_bytes": features_bytes(tiny_llava),
            "host_bytes": len(encoded(blue)) + 10,
        },
    )
    first = client.open(data_url(red))
    said = client.answer(first, "what is it?", **SHORT)
    second = client.open(data_url(blue))
    client.answer(second, "what is it?", **SHORT)

    again = client.ask(first, "which colour?", **SHORT).wait()

    assert tier(again) == "journal"
    messages = [question("what is it?", 1), reply_of(said), question("which colour?")]
    assert again.json["response_text"] == reference(messages, [red], NUM)
    follow_up = client.ask(first, "and now?", **SHORT).wait()
    assert tier(follow_up) == "kv"


def test_a_full_host_without_a_journal_refuses_the_newcomer_only(
    make_client: Any, reference: Any, red: Any, blue: Any
) -> None:
    """507 refuses an opening, an added image or a question with one; present sessions continue."""
    client = make_client(session={"host_bytes": len(encoded(red)) + 10})
    sid = client.open(data_url(red))

    refused = [
        client.call({"type": "start_session", "image": data_url(blue)}),
        client.call({"type": "add_images", "session_id": sid, "image": data_url(blue)}),
        client.ask(sid, "and this?", images=[data_url(blue)]).wait(),
    ]

    assert [(answer.status, answer.error) for answer in refused] == [(507, "OutOfMemory")] * 3
    assert client.answer(sid, "what is it?", **SHORT) == reference([question("what is it?", 1)], [red], NUM)
    assert len(client.service.images) == 1
    client.call({"type": "close_session", "session_id": sid})
    client.open(data_url(blue))


def test_many_sessions_on_the_memory_of_a_few(make_client: Any, tiny_llava: Any, reference: Any, pictures: Any) -> None:
    """Thirty sessions with memory for eight are answered rightly, twice, in any order, some concurrently."""
    rng = random.Random(0)
    client = make_client(
        session={"kv_bytes": kv_bytes(tiny_llava, 8 * 80), "features_bytes": 2 * features_bytes(tiny_llava)},
        engine={"max_rows": 4},
    )
    texts = ("what is it?", "what colour is it?")
    short = {"parameters": {"max_new_tokens": 8}}
    expected = []
    for picture in pictures:
        messages = [question(texts[0], 1)]
        first = reference(messages, [picture], 8)
        messages += [reply_of(first), question(texts[1])]
        expected.append((first, reference(messages, [picture], 8)))
    sessions = [(client.open(data_url(pictures[i % 8])), i % 8) for i in range(30)]

    for turn in range(2):
        rng.shuffle(sessions)
        for start in range(0, 30, 6):
            some = sessions[start : start + 6]
            asked = [client.ask(sid, texts[turn], **short) for sid, _ in some]
            found = [exchange.wait().json.get("response_text", exchange.body) for exchange in asked]
            assert found == [expected[picture][turn] for _, picture in some]

    status = settled(client)
    assert status["sessions"]["open"] == 30
    assert status["memory"]["kv_evicted"] > 0
    assert status["images"]["demoted"] > 0
    assert status["memory"]["features_bytes"] <= 2 * features_bytes(tiny_llava)


# Admission


def test_turns_wait_for_room(make_client: Any, endless_llava: Any, pictures: Any) -> None:
    """Three times as many turns as the pool has room for are all answered."""
    client = make_client(endless_llava, session={"kv_bytes": kv_bytes(endless_llava, 3 * 112)})
    alone = client.answer(client.open(data_url(pictures[0])), "what is it?", parameters={"max_new_tokens": 40})
    sids = [client.open(data_url(picture)) for picture in pictures]

    asked = [client.ask(sid, "what is it?", parameters={"max_new_tokens": 40}) for sid in sids]

    assert [exchange.wait().status for exchange in asked] == [200] * 8
    assert asked[0].json["response_text"] == alone


def test_turns_that_hold_blocks_already_wait_for_room(make_client: Any, endless_llava: Any, pictures: Any) -> None:
    """Sessions that fill the pool and together need more wait for each other without refusals."""
    client = make_client(endless_llava, session={"kv_bytes": kv_bytes(endless_llava, 4 * 80)})
    sids = [client.open(data_url(picture)) for picture in pictures[:4]]
    for sid in sids:
        client.answer(sid, "what is it?", parameters={"max_new_tokens": 16})
    assert settled(client)["memory"]["kv_evicted"] == 0
    before = client.pool.num_used

    asked = [client.ask(sid, "what colour is it?", parameters={"max_new_tokens": 60}) for sid in sids]

    assert before >= 16
    assert [(exchange.wait().status, exchange.error) for exchange in asked] == [(200, None)] * 4


def test_a_turn_that_waits_for_room_can_be_cancelled(make_client: Any, endless_llava: Any, red: Any, blue: Any) -> None:
    """A waiting turn ends when its client disconnects or its session closes, and then holds nothing."""
    hold = Hold(endless_llava)
    client = make_client(endless_llava, session={"kv_bytes": kv_bytes(endless_llava, 112)})
    running = client.ask(client.open(data_url(red)), "what is it?", parameters={"max_new_tokens": 40})
    hold.wait()
    sids = [client.open(), client.open()]
    leaving, closed = (client.ask(sid, "hello", parameters={"max_new_tokens": 90}) for sid in sids)
    wait_until(lambda: client.service.admission.num_using == 3, "both turns use memory")

    leaving.reply.cancel()
    client.call({"type": "close_session", "session_id": sids[1]})
    hold.release()

    assert running.wait().status == 200
    assert closed.wait().error == "SessionClosed"
    wait_until(lambda: settled(client)["turns"]["in_progress"] == 0, "the cancelled turn has ended")
    client.service.store.check_integrity()


@pytest.mark.parametrize("end", ["room", "leave", "close", "stop"])
def test_a_turn_waits_for_the_features_of_others(
    make_client: Any, endless_llava: Any, red: Any, blue: Any, end: str
) -> None:
    """With memory for one image, which a prefill reads, the second turn waits.

    It is answered afterwards, or ends before and then holds nothing.
    """
    client = make_client(endless_llava, session={"features_bytes": features_bytes(endless_llava)})
    room = client.service.admission
    expected = client.answer(client.open(data_url(blue)), "what is it?", **SHORT)
    sids = [client.open(data_url(picture)) for picture in (red, blue)]
    client.open(data_url(red.rotate(45)))  # uses the memory of both
    hold = Hold(endless_llava)
    running = client.ask(sids[0], "what is it?", **SHORT)
    hold.wait()
    waiting = client.ask(sids[1], "what is it here?" if end != "room" else "what is it?", **SHORT)
    wait_until(lambda: room.num_waiting == 1, "the second turn waits")

    if end == "leave":
        waiting.reply.cancel()
    elif end == "close":
        client.call({"type": "close_session", "session_id": sids[1]})
        assert waiting.wait().error == "SessionClosed"
    elif end == "stop":
        stopping = client.begin_stop()
    hold.release()

    if end == "stop":
        assert {exchange.wait().error for exchange in (running, waiting)} == {"InternalError"}
    else:
        assert running.wait().status == 200
    if end == "room":
        assert waiting.wait().json["response_text"] == expected
    if end == "stop":
        stopping.join()
    turns = client.service.numbers()["turns"] if end == "stop" else settled(client)["turns"]
    assert turns["in_progress"] == 0
    assert turns["cancelled" if end == "leave" else "failed"] == {"room": 0, "leave": 1, "close": 1, "stop": 2}[end]
    assert repr(room) == "<Admission 0 using, 0 waiting>"


def test_turns_that_can_never_be_answered_do_not_wait_for_one_another(
    make_client: Any, endless_llava: Any, pictures: Any
) -> None:
    """Turns with two images each and memory for one are refused, long before their deadlines."""
    client = make_client(endless_llava, session={"features_bytes": features_bytes(endless_llava)})
    sids = [client.open(data_url(pictures[i]), data_url(pictures[i + 1])) for i in range(4)]

    asked = [client.ask(sid, "what is it?", **SHORT) for sid in sids]

    assert [exchange.wait().error for exchange in asked] == ["OutOfMemory"] * 4


@pytest.mark.parametrize("limit", ["kv_bytes", "max_session_bytes"])
def test_what_can_never_fit_is_told_at_once(make_client: Any, endless_llava: Any, limit: str) -> None:
    """A turn that exceeds the total memory is refused while another turn runs; the message states the limit."""
    hold = Hold(endless_llava)
    client = make_client(endless_llava, session={limit: kv_bytes(endless_llava, 128)})
    running = client.ask(client.open(), "hello", parameters={"max_new_tokens": 100})
    hold.wait()

    refused = client.ask(client.open(), "hello", parameters={"max_new_tokens": 130}).wait()
    hold.release()

    assert (refused.status, refused.error) == (400, "ContextTooLong")
    assert str(kv_bytes(endless_llava, 128)) in refused.json["error"]["message"]
    assert running.wait().status == 200


# Limits of one conversation


def test_prompt_has_its_own_limit(make_client: Any) -> None:
    """engine.max_prompt_tokens also limits requests without a session."""
    client = make_client(engine={"max_prompt_tokens": 20})
    sid = client.open()

    assert client.ask(sid, "short", **SHORT).wait().status == 200
    for answer in (client.ask(sid, "word " * 20, **SHORT).wait(), client.call({"inputs": "word " * 20})):
        assert (answer.status, answer.error) == (400, "ContextTooLong")
        assert "20" in answer.json["error"]["message"]


def test_context_has_its_own_limit(make_client: Any, endless_llava: Any) -> None:
    """engine.max_context_tokens ends answers, and refuses questions that leave no room for one."""
    client = make_client(endless_llava, engine={"max_context_tokens": 40})
    sid = client.open()

    answer = client.ask(sid, "short", parameters={"max_new_tokens": 100, "details": True}).wait()

    assert answer.json["details"]["finish_reason"] == "length"
    assert num_tokens(answer) + answer.json["details"]["generated_tokens"] == 40
    assert client.ask(client.open(), "word " * 40).wait().error == "ContextTooLong"


def test_images_of_a_session_are_limited(make_client: Any, red: Any, blue: Any) -> None:
    """The limit applies to opening, adding and asking; a refused image is not kept."""
    client = make_client(session={"max_images": 1})
    sid = client.open(data_url(red))

    refused = [
        client.call({"type": "start_session", "images": [data_url(red), data_url(blue)]}),
        client.call({"type": "add_images", "session_id": sid, "image": data_url(blue)}),
        client.ask(sid, "and this?", images=[data_url(blue)]).wait(),
    ]

    assert [(answer.status, answer.error) for answer in refused] == [(400, "InvalidRequest")] * 3
    assert len(client.service.images) == 1
    assert client.ask(sid, "what is it?", **SHORT).wait().status == 200


def test_an_image_may_come_while_others_fill_the_device(
    make_client: Any, tiny_llava: Any, reference: Any, red: Any, blue: Any
) -> None:
    """An opening needs no device memory for its image while the features of others are in use."""
    client = make_client(session={"features_bytes": features_bytes(tiny_llava)})
    sid, store = client.open(data_url(red)), client.service.images
    (image,) = client.session(sid).pending_images
    store.pin(image, lambda: b"")

    other = client.open(data_url(blue))
    store.unpin(image)

    assert client.answer(other, "what is it?", **SHORT) == reference([question("what is it?", 1)], [blue], NUM)


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (MemoryError(), "OutOfMemory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "OutOfMemory"),
        (RuntimeError("other"), "InternalError"),
    ],
)
def test_no_memory_for_an_images_pixels(
    make_client: Any, endless_llava: Any, red: Any, failure: Exception, error: str
) -> None:
    """Without memory for an image's pixels the status is 507 instead of 500, because a retry may succeed."""
    client = make_client(endless_llava)

    def preprocess(picture: Any) -> Any:
        raise failure

    endless_llava.preprocess = preprocess

    assert client.call({"type": "start_session", "images": [data_url(red)]}).error == error
    assert len(client.service.images) == 0


@pytest.mark.parametrize(("part", "step"), [(SessionStore, "open"), (SessionImages, "add")])
def test_an_opening_that_fails_for_any_reason_holds_no_image(
    make_client: Any, red: Any, part: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client()

    def fail(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(part, step, fail)

    assert client.call({"type": "start_session", "images": [data_url(red)]}).error == "InternalError"
    assert len(client.service.images) == 0


def test_a_branch_that_fails_for_any_reason_holds_no_image(
    make_client: Any, red: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client()
    sid = client.open(data_url(red))
    client.answer(sid, "what is it?", **SHORT)

    def fail(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(SessionImages, "add", fail)

    assert client.call({"type": "branch_session", "session_id": sid, "turns": 1}).error == "InternalError"
    client.call({"type": "close_session", "session_id": sid})
    assert len(client.service.images) == 0


@pytest.mark.parametrize("is_early", [True, False])
def test_a_branch_of_a_session_that_is_closed_meanwhile_is_refused(
    make_client: Any, red: Any, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """The client learns that the session was closed, before or after its texts are copied, and no image stays held."""
    client = make_client()
    sid = client.open(data_url(red))
    client.answer(sid, "what is it?", **SHORT)
    part, name = (recorder, "entries_of") if is_early else (SessionStore, "check_chars")
    step = getattr(part, name)

    def close_first(*args: Any) -> Any:
        client.service.store.close(client.session(sid))
        monkeypatch.undo()
        return step(*args)

    monkeypatch.setattr(part, name, close_first)

    assert client.call({"type": "branch_session", "session_id": sid, "turns": 1}).error == "SessionClosed"
    assert len(client.service.images) == 0
    assert client.service.store.session_ids() == []


# Conversations longer than the context


def test_long_conversation_goes_on_without_its_oldest_turns(make_client: Any, demo_llava: Any, red: Any) -> None:
    """With overflow=drop_oldest every answer equals the one to the shortened conversation, which keeps its image."""
    settings = {"session": {"overflow": "drop_oldest"}, "engine": {"max_context_tokens": 160}}
    client, reference = make_client(demo_llava, **settings), Reference(DEMO)
    sid = client.open(data_url(red))
    texts = ["what is the shape?", "is it large?", "where is it?"] * 6 + ["what colour is it?"]
    turns: list[tuple[str, str]] = []
    dropped = []

    for text in texts:
        answer = client.ask(sid, text, parameters={"max_new_tokens": 8}).wait()
        num_dropped = int(answer.headers.get("x-torchmoor-dropped-turns", 0))
        dropped.append(num_dropped)
        kept = turns[num_dropped:]
        messages = [m for asked, said in kept for m in (question(asked), reply_of(said))] + [question(text)]
        messages[0]["content"].insert(0, {"type": "image"})
        assert answer.json["response_text"] == reference(messages, [red], 8)
        assert num_tokens(answer) < 160
        turns.append((text, answer.json["response_text"]))

    assert dropped[0] == 0
    assert dropped == sorted(dropped)
    assert len(set(dropped)) < len(texts) / 2  # several at once, so that most questions find their stored blocks
    assert dropped[-1] > 8
    assert "red" in turns[-1][1]


def test_dropped_turns_are_forgotten(make_client: Any, endless_llava: Any) -> None:
    """A session's memory, and the work per question, stay constant however long the conversation becomes."""
    client = make_client(endless_llava, session={"overflow": "drop_oldest"}, engine={"max_context_tokens": 120})
    session = client.session(client.open())

    for i in range(30):
        answer = client.ask(session.id.text, "hello", **SHORT).wait()
        num_dropped = int(answer.headers.get("x-torchmoor-dropped-turns", 0))
        assert len(session.messages) == 2 * (i + 1 - num_dropped) < 30

    assert num_dropped > 15


def test_a_long_conversation_that_was_rebuilt_is_shortened_quickly(make_client: Any, endless_llava: Any) -> None:
    """A rebuilt conversation is rendered a few times, not once for every few of its turns."""
    client = make_client(endless_llava, session={"overflow": "drop_oldest"}, engine={"max_context_tokens": 120})
    session = client.session(client.open())
    session.messages = [message for _ in range(200) for message in (question("hello"), reply_of("hello"))]
    rendered: list[int] = []

    def render(messages: Any, sizes: Any, *others: Any) -> Any:
        rendered.append(len(messages))
        return endless_llava.real.render(messages, sizes, *others)

    endless_llava.render = render
    answer = client.ask(session.id.text, "hello", **SHORT).wait()

    assert 180 < int(answer.headers["x-torchmoor-dropped-turns"]) < 200
    assert len(rendered) < 12


def test_dropping_turns_leaves_room_for_the_answer(make_client: Any, endless_llava: Any) -> None:
    """Turns are dropped before the room for answers shrinks."""
    client = make_client(endless_llava, session={"overflow": "drop_oldest"}, engine={"max_context_tokens": 120})
    sid = client.open()

    for i in range(10):
        wanted = 20 + 7 * (i % 5)
        answer = client.ask(sid, "hello", parameters={"max_new_tokens": wanted, "details": True}).wait()
        assert answer.json["details"]["generated_tokens"] == wanted


def test_dropping_turns_keeps_a_conversation_within_its_bytes(make_client: Any, endless_llava: Any) -> None:
    """A session's device memory limits its conversation as the model's context does."""
    limit = kv_bytes(endless_llava, 96)
    client = make_client(endless_llava, session={"overflow": "drop_oldest", "max_session_bytes": limit})
    sid = client.open()

    for _ in range(12):
        answer = client.ask(sid, "hello", parameters={"max_new_tokens": 10}).wait()
        assert answer.status == 200, answer.body
        assert client.session(sid).cache.num_bytes <= limit


def test_long_conversation_is_refused_unless_turns_may_be_dropped(make_client: Any) -> None:
    """With overflow=error, a conversation beyond the context gets ContextTooLong and loses nothing."""
    client = make_client(engine={"max_context_tokens": 100})
    sid = client.open()
    answer = client.ask(sid, "what is it?", parameters={"max_new_tokens": 8}).wait()
    while answer.status == 200:
        assert "x-torchmoor-dropped-turns" not in answer.headers
        num_messages = len(client.session(sid).messages)
        answer = client.ask(sid, "what is it?", parameters={"max_new_tokens": 8}).wait()

    assert answer.error == "ContextTooLong"
    assert len(client.session(sid).messages) == num_messages > 4


def test_question_that_is_too_long_alone_is_refused(make_client: Any) -> None:
    """Dropping all earlier turns does not help a question that is too long by itself."""
    client = make_client(session={"overflow": "drop_oldest"}, engine={"max_context_tokens": 60})
    sid = client.open()
    client.answer(sid, "hello", **SHORT)

    assert client.ask(sid, "word " * 60).wait().error == "ContextTooLong"
    assert client.ask(sid, "hello", **SHORT).wait().status == 200


# Ends at each stage


STAGES = ("waiting for its turn", "fetching", "encoding", "prefilling", "decoding")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("end", ["leave", "close", "fail"])
def test_a_turn_that_ends_anywhere_lets_go_of_everything(
    make_client: Any, endless_llava: Any, monkeypatch: pytest.MonkeyPatch, red: Any, blue: Any, stage: str, end: str
) -> None:
    """After a disconnect, a close or a failure at any stage, no pin, image or block is left."""
    arrived, may_go_on = threading.Event(), threading.Event()

    def stop_here() -> bool:
        if not arrived.is_set():
            arrived.set()
            assert may_go_on.wait(30)
            if end == "fail":
                raise RuntimeError("boom")
        return True

    client = make_client(endless_llava, engine={"prefill_chunk": 16})
    sid = client.open(data_url(red))
    first = None
    if stage == "waiting for its turn":
        endless_llava.before_step = lambda embeds, batch: stop_here()
        first = client.ask(sid, "what is it?", **SHORT)
        assert arrived.wait(30)
    elif stage == "fetching":
        read = ImageLoader.read
        monkeypatch.setattr(ImageLoader, "read", lambda *args: stop_here() and read(*args))
    elif stage == "encoding":
        encode = endless_llava.real.encode_image
        monkeypatch.setattr(endless_llava.real, "encode_image", lambda pixels: stop_here() and encode(pixels))
    else:
        is_here = {"prefilling": lambda batch: batch.shares[0].length > 20, "decoding": lambda batch: True}[stage]

        def before_step(embeds: torch.Tensor, batch: Any) -> None:
            if is_here(batch) and (stage == "prefilling" or batch.shares[0].num_tokens == 1):
                stop_here()

        endless_llava.before_step = before_step

    ended = client.ask(sid, "and this?", images=[data_url(blue)], stream=True, parameters={"max_new_tokens": 100})
    assert arrived.wait(30)
    if end == "leave":
        ended.reply.cancel()
    elif end == "close":
        client.call({"type": "close_session", "session_id": sid})
    may_go_on.set()

    if first is not None:
        assert first.wait().status == {"leave": 200, "close": 410, "fail": 500}[end]
    if end == "leave":
        client.ask(sid, "go on", **SHORT).wait()
    else:
        ended.wait()
        if end == "close":
            assert b"SessionClosed" in ended.body
    if end != "close":
        images = client.session(sid).images
        assert len(images) == (2 if stage == "waiting for its turn" and end == "fail" else 1 if end == "leave" else 0)
        client.call({"type": "close_session", "session_id": sid})
    assert settled(client)["turns"]["in_progress"] == 0
    assert holds_nothing(client)


@pytest.mark.parametrize("stage", ["fetching", "prefilling", "decoding"])
def test_a_turn_whose_time_is_up_lets_go_of_everything(
    make_client: Any, endless_llava: Any, monkeypatch: pytest.MonkeyPatch, red: Any, stage: str
) -> None:
    """The deadline gives 504 at any stage, and the session continues."""
    read = ImageLoader.read

    def wait_until_late() -> bool:
        return not threading.Event().wait(0.4)

    client = make_client(endless_llava, engine={"turn_timeout_s": 0.3, "prefill_chunk": 16})
    sid = client.open()
    with monkeypatch.context() as patch:
        if stage == "fetching":
            patch.setattr(ImageLoader, "read", lambda *args: wait_until_late() and read(*args))
        else:
            size = 1 if stage == "decoding" else 16
            endless_llava.before_step = lambda embeds, batch: (
                wait_until_late() if batch.shares[0].num_tokens == size else None
            )
        late = client.ask(sid, "and this?", images=[data_url(red)], parameters={"max_new_tokens": 50}).wait()
    endless_llava.before_step = lambda embeds, batch: None

    assert (late.status, late.error) == (504, "TurnTimedOut")
    assert len(client.service.images) == 0
    client.service.store.check_integrity()
    short = {"max_new_tokens": 1}  # on a busy machine, even this may take longer than a turn may here
    wait_until(lambda: client.ask(sid, "hello", parameters=short).wait().status == 200, "the session continues")


def test_turns_at_once_with_room_for_two_images(
    make_client: Any, tiny_llava: Any, reference: Any, pictures: Any
) -> None:
    """Concurrent clients with memory for two images get right answers.

    Images and blocks are loaded and evicted all the time; only a lack of memory refuses a turn.
    """
    client = make_client(
        session={"kv_bytes": kv_bytes(tiny_llava, 3 * 80), "features_bytes": 2 * features_bytes(tiny_llava)},
        engine={"max_rows": 2, "prefill_chunk": 24},
    )
    expected = [reference([question("what colour is it?", 1)], [picture], 6) for picture in pictures]
    failures: list[str] = []
    answered: list[int] = []

    def converse(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            which = rng.randrange(len(pictures))
            opened = client.call({"type": "start_session", "image": data_url(pictures[which])})
            if opened.status != 200:
                failures.extend([] if opened.error == "OutOfMemory" else [repr(opened.body)])
                continue
            sid = opened.json["session_id"]
            asked = client.ask(sid, "what colour is it?", parameters={"max_new_tokens": 6})
            action = rng.choice(["wait", "wait", "leave", "close"])
            if action == "leave":
                asked.reply.cancel()
            elif action == "close":
                client.call({"type": "close_session", "session_id": sid})
                asked.wait()
            elif asked.wait().status == 200:
                answered.append(which)
                if asked.json["response_text"] != expected[which]:
                    failures.append(f"{COLOURS[which]}: {asked.json['response_text']}")
            elif asked.error != "OutOfMemory":
                failures.append(repr(asked.body))
            client.call({"type": "close_session", "session_id": sid})

    threads = [threading.Thread(target=converse, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()

    assert failures == []
    assert len(answered) > 10
    wait_until(lambda: client.pool.num_used == 0, "the cancelled turns have freed their blocks")
