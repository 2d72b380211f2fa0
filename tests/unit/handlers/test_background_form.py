"""A response in the background as clients follow it: each gets every event once, from wherever it begins."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from handlers.chat.dialects.background_form import BackgroundForm
from handlers.chat.feed import AnswerFeed
from handlers.chat.forms import Token
from handlers.errors import ClientGone, SessionLost
from handlers.requests.reply import PendingReply, ReplyPieces
from tests.unit.handlers.test_response_form import ITEMS, make_token, read, summarize

FAILED = {"status": "failed", "error": {"code": "server_error", "message": "why"}}


def make_form() -> BackgroundForm:
    fields = {"status": "queued", "usage": None, "background": True}
    form = BackgroundForm(fields, ITEMS, has_logprobs=True)
    form.place("ts-seq-a", 3)
    return form


def make_reply() -> PendingReply:
    return PendingReply(lambda: None)


def take(reply: PendingReply) -> list[dict[str, Any]]:
    """Return all events that a client has been sent, of an ended stream or one that goes on."""
    data = b""
    while isinstance(piece := reply.take(1 << 20), ReplyPieces) and (piece.data or piece.headers):
        data += piece.data
        if piece.is_end:
            break
    return read(data)


def end(feed: AnswerFeed, form: BackgroundForm, last: Token) -> list[dict[str, Any]]:
    """Record the answer and end the clients' streams. Return the events of the stored answer."""
    answer, response = form.record(summarize([last]))
    feed.end(last)
    return read(make_form().repeat(answer, response, -1))


@given(st.lists(st.text(max_size=4), min_size=1, max_size=8), st.data())
def test_followers_get_the_events_of_the_stored_response(texts: list[str], data: st.DataObject) -> None:
    """A client gets the stored response's events from any event on, whether it connects before or during generation."""
    tokens = [make_token(i, text) for i, text in enumerate(texts)]
    feed, form = AnswerFeed(), make_form()
    joins = data.draw(st.lists(st.tuples(st.integers(0, len(tokens)), st.integers(-1, 20)), max_size=5))
    followers = [(make_reply(), after) for _, after in joins]

    def join(place: int) -> None:
        for (at, _), (reply, after) in zip(joins, followers, strict=True):
            if at == place:
                feed.follow(reply, make_form(), after, {})

    join(0)
    feed.begin(form, lambda: None)
    for place, token in enumerate(tokens[:-1], 1):
        feed.add(form, [token])
        join(place)
    join(len(tokens))
    stored = end(feed, form, tokens[-1])

    assert [event["sequence_number"] for event in stored] == list(range(len(stored)))
    for reply, after in followers:
        assert take(reply) == stored[after + 1 :]


@given(st.lists(st.text(min_size=1, max_size=4), min_size=2, max_size=8), st.data())
def test_a_second_attempt_repeats_no_event(texts: list[str], data: st.DataObject) -> None:
    """A client that has events of the first attempt gets only the others, once the second attempt has caught up."""
    tokens = [make_token(i, text) for i, text in enumerate(texts)]
    feed, reply = AnswerFeed(), make_reply()
    first, second = make_form(), make_form()
    num_first = data.draw(st.integers(0, len(tokens) - 1))
    feed.follow(reply, make_form(), -1, {})
    feed.begin(first, lambda: None)
    feed.add(first, tokens[:num_first])

    feed.begin(second, lambda: None)
    feed.add(first, tokens[num_first:-1])  # by a thread that was late
    feed.add(second, tokens[:-1])

    stored = end(feed, second, tokens[-1])

    assert take(reply) == stored


def test_a_failure_reaches_clients_that_have_more_events_than_there_are() -> None:
    feed, ahead, behind = AnswerFeed(), make_reply(), make_reply()
    feed.follow(ahead, make_form(), 40, {})
    feed.follow(behind, make_form(), -1, {})

    feed.fail(FAILED)

    (last,) = take(ahead)
    assert (last["type"], last["sequence_number"], last["response"]["error"]) == (
        "response.failed",
        41,
        FAILED["error"],
    )
    assert [event["type"] for event in take(behind)] == ["response.created", "response.queued", "response.failed"]


def test_an_error_follows_the_last_event_that_the_client_has() -> None:
    """It has the next number, also for a client that connected before the generation began."""
    feed, form, reply = AnswerFeed(), make_form(), make_reply()
    feed.follow(reply, make_form(), -1, {})
    feed.begin(form, lambda: None)
    feed.add(form, [make_token(0, "ab")])

    feed.stop(SessionLost())

    events = take(reply)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[-2:]] == ["response.output_text.delta", "error"]


def test_an_answer_that_another_instance_has_stored_repeats_no_event() -> None:
    """A client that has a part of the answer gets the other events of the stored one."""
    tokens = [make_token(number, text) for number, text in enumerate(("ab", "cd", "ef"))]
    elsewhere, form, feed, reply = make_form(), make_form(), AnswerFeed(), make_reply()
    for token in tokens[:-1]:
        elsewhere.note(token)
    answer, response = elsewhere.record(summarize(tokens[-1:]))
    feed.follow(reply, make_form(), -1, {})
    feed.begin(form, lambda: None)
    feed.add(form, tokens[:2])

    form.restore(answer, response)
    feed.end(tokens[-1])

    assert take(reply) == read(make_form().repeat(answer, response, -1))


def test_a_client_that_has_left_is_forgotten() -> None:
    feed, form, gone = AnswerFeed(), make_form(), make_reply()
    feed.follow(gone, make_form(), -1, {})

    gone.cancel(ClientGone("left"))
    feed.begin(form, lambda: None)

    assert end(feed, form, Token(0, "x", 0.0, False))


def test_readers_are_woken_without_the_lock_of_the_feed() -> None:
    """They may use the feed before they return, as does a reader that is at work on another thread."""
    feed, form = AnswerFeed(), make_form()
    with ThreadPoolExecutor(1) as threads:
        reply = PendingReply(lambda: threads.submit(feed.add, form, []).result(30))
        feed.follow(reply, make_form(), -1, {})
        feed.begin(form, lambda: None)

        assert end(feed, form, make_token(0, "x")) == take(reply)
