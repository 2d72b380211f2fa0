"""The chat service with the tiny checkpoint, in process: conversations, streams, queues, ends."""

import base64
import json
import random
import threading
from typing import Any

import pytest
import torch

from handlers.chat.sessions.unjournaled_sessions import RememberedOpenings
from handlers.chat.turns.context_limits import truncate
from handlers.engine.builtin.kv_cache import BLOCK, cache_shape
from tests.torchserve.drawings import data_url
from tests.unit.handlers.conftest import FakeClock, SlowImages
from tests.waiting import wait_until

NUM = 16
GREEDY = {"max_new_tokens": NUM}
SHORT = {"parameters": GREEDY}


def question(text: str, num_images: int = 0) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [*({"type": "image"} for _ in range(num_images)), {"type": "text", "text": text}],
    }


def reply_of(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


class Hold:
    """Stop the engine before its next step, or after some steps, until the test releases it."""

    def __init__(self, model: Any, num_steps: int = 0) -> None:
        self._num_left = num_steps
        self._model = model
        self.is_reached = threading.Event()
        self._may_go_on = threading.Event()
        model.before_step = self._before_step

    def _before_step(self, embeds: torch.Tensor, batch: Any) -> None:
        self._num_left -= 1
        if self._num_left < 0 and not self._may_go_on.is_set():
            self.is_reached.set()
            assert self._may_go_on.wait(30)

    def wait(self) -> None:
        assert self.is_reached.wait(30)

    def release(self) -> None:
        self._may_go_on.set()


def settled(client: Any) -> dict[str, Any]:
    """Return the status once the engine's thread has done all earlier work."""
    client.engine.call(lambda: None).result(30)
    return client.call(None, {"x-torchmoor-operation": "status"}).json


# Conversations


def test_conversation_answers_as_a_stateless_model_would(client: Any, reference: Any, red: Any, blue: Any) -> None:
    """Each turn equals transformers' generate() on the whole conversation, with an image added half way."""
    sid = client.open(data_url(red))
    messages, images = [question("what is the shape?", 1)], [red]

    for text in ("what colour is it?", "and the other one?", "how many shapes are there?"):
        found = client.answer(sid, messages[-1]["content"][-1]["text"], **SHORT)
        assert found == reference(messages, images, NUM)
        messages += [reply_of(found), question(text)]
        if text.startswith("and"):
            assert client.call({"type": "add_images", "session_id": sid, "image": data_url(blue)}).status == 200
            messages[-1] = question(text, 1)
            images.append(blue)

    assert client.answer(sid, messages[-1]["content"][-1]["text"], **SHORT) == reference(messages, images, NUM)


def test_question_may_bring_its_own_image(client: Any, reference: Any, red: Any, blue: Any) -> None:
    """An image in the question's body belongs to that question."""
    sid = client.open(data_url(red))
    first = client.answer(sid, "what is it?", **SHORT)

    second = client.answer(sid, "and this?", images=[data_url(blue)], **SHORT)

    messages = [question("what is it?", 1), reply_of(first), question("and this?", 1)]
    assert second == reference(messages, [red, blue], NUM)


def test_session_without_an_image_chats(client: Any, reference: Any) -> None:
    """An opening without an image starts a text conversation."""
    sid = client.open()

    assert client.answer(sid, "hello", **SHORT) == reference([question("hello")], [], NUM)


def test_follow_up_prefills_its_own_tokens_only(client: Any, red: Any) -> None:
    """The receipt states the source of the context; the image is encoded once per session."""
    sid = client.open(data_url(red))

    receipts = [client.ask(sid, text, **SHORT).wait().headers for text in ("what is the shape?", "is it red?")]

    assert [r["x-torchmoor-cache-tier"] for r in receipts] == ["features", "kv"]
    first, second = (int(r["x-torchmoor-prefill-tokens"]) for r in receipts)
    contexts = [int(r["x-torchmoor-context-tokens"]) for r in receipts]
    assert first == contexts[0] > 36
    assert second < contexts[1] - contexts[0] + 3  # the question, its frame and the answer's last token
    assert float(receipts[0]["x-torchmoor-ttft-ms"]) > 0
    assert int(receipts[0]["x-torchmoor-generated-tokens"]) >= 1
    assert settled(client)["images"] == {"received": 1, "fetched": 0, "encoded": 1, "shared": 0, "demoted": 0}


def test_interleaved_sessions_keep_their_images_apart(make_client: Any, reference: Any, red: Any, blue: Any) -> None:
    """Concurrent turns of two sessions answer as each alone would."""
    client = make_client(engine={"prefill_chunk": 16})
    sids = [client.open(data_url(red)), client.open(data_url(blue))]
    histories: list[list[dict[str, Any]]] = [[], []]

    for text in ("what colour is the shape?", "what shape is it?", "where is it?"):
        for i in range(2):
            histories[i].append(question(text, 0 if histories[i] else 1))
        asked = [client.ask(sid, text, **SHORT) for sid in sids]
        for i, (exchange, picture) in enumerate(zip(asked, (red, blue), strict=True)):
            found = exchange.wait().json["response_text"]
            assert found == reference(histories[i], [picture], NUM)
            histories[i].append(reply_of(found))


def features_bytes(model: Any) -> int:
    """Return the size of one image's features in float32."""
    config = model.model.config
    return 4 * int(config.image_seq_length) * int(config.text_config.hidden_size)


def kv_bytes(model: Any, num_tokens: int) -> int:
    """Return the size of the KV blocks for a number of tokens."""
    return cache_shape(model).num_bytes(num_tokens)


def holds_nothing(client: Any) -> bool:
    """Return whether neither blocks nor images are held."""
    memory = settled(client)["memory"]
    return not (memory["kv_bytes"] or memory["features_bytes"] or memory["host_bytes"])


def test_session_that_lost_its_cache_answers_the_same(
    make_client: Any, tiny_llava: Any, reference: Any, red: Any, blue: Any
) -> None:
    """Evicted keys and values are computed again from the image's features, not from the image."""
    client = make_client(session={"kv_bytes": kv_bytes(tiny_llava, 150)})
    first, second = client.open(data_url(red)), client.open(data_url(blue))
    longer = {"max_new_tokens": 50}  # two sessions do not fit in memory at once
    answers = [
        client.answer(first, "what is it?", parameters=longer),
        client.answer(second, "what is it?", parameters=longer),
    ]

    again = client.ask(first, "which colour?", parameters=longer).wait()

    assert again.headers["x-torchmoor-cache-tier"] == "features"
    messages = [question("what is it?", 1), reply_of(answers[0]), question("which colour?")]
    assert again.json["response_text"] == reference(messages, [red], 50)
    status = settled(client)
    assert status["memory"]["kv_evicted"] >= 1
    assert status["images"]["encoded"] == 2


def test_sampling_with_a_seed_repeats(client: Any, red: Any) -> None:
    """One seed gives two sessions the same answer; temperature and penalty accept whole numbers."""
    parameters = {"do_sample": True, "temperature": 2, "repetition_penalty": 2, "seed": 5, **GREEDY}

    found = {client.answer(client.open(data_url(red)), "what?", parameters=parameters) for _ in range(3)}

    assert len(found) == 1


# Streams


STREAMS = {"text": "", "tgi": "text/event-stream", "lmi": "application/jsonlines"}


def test_streamed_text_equals_the_whole_answer(client: Any, red: Any) -> None:
    """The plain stream's bytes are the answer's text."""
    whole = client.answer(client.open(data_url(red)), "what is the shape?", **SHORT)

    streamed = client.ask(client.open(data_url(red)), "what is the shape?", stream=True, **SHORT).wait()

    assert streamed.body.decode() == whole
    assert streamed.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert streamed.headers["x-torchmoor-cache-tier"] == "features"
    assert len(streamed.pieces) >= 2


def test_tgi_stream(client: Any, red: Any) -> None:
    """Server-sent events in TGI's form have a token each; the last has the text and the details."""
    whole = client.answer(client.open(data_url(red)), "what is the shape?", **SHORT)

    streamed = client.ask(
        client.open(data_url(red)), "what is the shape?", stream=True, headers={"accept": "text/event-stream"}, **SHORT
    ).wait()

    assert streamed.headers["Content-Type"] == "text/event-stream"
    blocks = streamed.body.decode().split("\n\n")
    assert blocks.pop() == ""
    events = [json.loads(block.removeprefix("data:")) for block in blocks]
    assert all(set(event) == {"index", "token", "generated_text", "details"} for event in events)
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert all(set(event["token"]) == {"id", "text", "logprob", "special"} for event in events)
    assert "".join(event["token"]["text"] for event in events) == whole
    assert [event["generated_text"] for event in events] == [None] * (len(events) - 1) + [whole]
    details = events[-1]["details"]
    assert details["generated_tokens"] == len(events)
    assert details["finish_reason"] in ("eos_token", "length")
    assert details["input_length"] == int(streamed.headers["x-torchmoor-context-tokens"])


def test_lmi_stream(client: Any, red: Any) -> None:
    """JSON lines in LMI's form have generated_text and details in the last line only."""
    whole = client.answer(client.open(data_url(red)), "what is the shape?", **SHORT)

    streamed = client.ask(
        client.open(data_url(red)),
        "what is the shape?",
        stream=True,
        headers={"accept": "application/jsonlines"},
        **SHORT,
    ).wait()

    assert streamed.headers["Content-Type"] == "application/jsonlines"
    lines = [json.loads(line) for line in streamed.body.decode().splitlines()]
    assert all(set(line) == {"token"} for line in lines[:-1])
    assert "".join(line["token"]["text"] for line in lines) == whole == lines[-1]["generated_text"]
    assert lines[-1]["details"]["generated_tokens"] == len(lines)


def test_full_text_and_details(client: Any, red: Any) -> None:
    """return_full_text puts the question before the answer in every form; details contain the finish reason."""
    prompt = "what is the shape? \u00e9"
    whole = client.answer(client.open(data_url(red)), prompt, **SHORT)
    parameters = {**GREEDY, "return_full_text": True, "details": True, "seed": 3}

    def ask(**fields: Any) -> Any:
        return client.ask(client.open(data_url(red)), prompt, parameters=parameters, **fields).wait()

    plain = ask()
    assert plain.json["response_text"] == prompt + whole
    assert plain.json["details"]["seed"] == 3
    assert ask(stream=True).body.decode() == prompt + whole
    lines = ask(stream=True, headers={"accept": "application/jsonlines"}).body.decode().splitlines()
    assert json.loads(lines[-1])["generated_text"] == prompt + whole
    assert "".join(json.loads(line)["token"]["text"] for line in lines) == whole


def test_stop_string_ends_the_answer_and_the_memory_of_it(make_client: Any, endless_llava: Any, red: Any) -> None:
    """The answer ends before the stop string, streamed or not, and the conversation contains the visible text."""
    client = make_client(endless_llava)
    whole = client.answer(client.open(data_url(red)), "what?", parameters={"max_new_tokens": 40})
    assert len(whole) > 8
    stop = whole[6:8]
    parameters = {"max_new_tokens": 40, "stop": [stop], "details": True}

    sid = client.open(data_url(red))
    answer = client.ask(sid, "what?", parameters=parameters).wait().json
    streamed = client.ask(client.open(data_url(red)), "what?", parameters=parameters, stream=True).wait()

    assert answer["response_text"] == whole[: whole.index(stop)] == streamed.body.decode()
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert client.session(sid).messages[-1] == reply_of(answer["response_text"])
    assert client.ask(sid, "more", parameters=GREEDY).wait().headers["x-torchmoor-cache-tier"] == "kv"


@pytest.mark.parametrize("is_raw", [False, True])
def test_truncate_keeps_whole_characters(tiny_llava: Any, is_raw: bool) -> None:
    """A character of several tokens is kept or left out."""
    text = "🎉🎉🎉"

    found = {truncate(tiny_llava, text, number, is_raw=is_raw) for number in range(4, 12)}

    assert found <= {"🎉", "🎉🎉", text}


def test_truncate_keeps_the_last_tokens_of_the_question(client: Any, tiny_llava: Any) -> None:
    """The question keeps at most this number of its last tokens."""
    sid = client.open()
    text = "one two three four five six seven"
    ids = tiny_llava.tokenizer(text, add_special_tokens=False)["input_ids"]

    client.answer(sid, text, parameters={**GREEDY, "truncate": 3})
    client.answer(sid, "short", parameters={**GREEDY, "truncate": 1000})

    asked = [m["content"][-1]["text"] for m in client.session(sid).messages if m["role"] == "user"]
    assert asked == [tiny_llava.tokenizer.decode(ids[-3:]), "short"]


# Turns


def test_turns_of_a_session_run_in_order(make_client: Any, endless_llava: Any, red: Any) -> None:
    """Concurrent questions are answered one after the other, each with the earlier ones in its context."""
    hold = Hold(endless_llava)
    client = make_client(endless_llava)
    sid = client.open(data_url(red))

    asked = [client.ask(sid, text, **SHORT) for text in ("first", "second", "third")]
    hold.wait()
    assert settled_turns(client) == (1, 2)
    hold.release()
    for exchange in asked:
        assert exchange.wait().status == 200

    messages = client.session(sid).messages
    assert [m["content"][-1]["text"] for m in messages if m["role"] == "user"] == ["first", "second", "third"]
    tiers = [exchange.headers["x-torchmoor-cache-tier"] for exchange in asked]
    assert tiers == ["features", "kv", "kv"]


def settled_turns(client: Any) -> tuple[int, int]:
    turns = client.call(None, {"x-torchmoor-operation": "status"}).json["turns"]
    return turns["running"], turns["waiting"]


def test_too_many_waiting_turns_are_overload(make_client: Any, endless_llava: Any, red: Any) -> None:
    """A question beyond the queue's limit is 429 with Retry-After; the others are answered."""
    hold = Hold(endless_llava)
    client = make_client(endless_llava, session={"max_waiting_turns": 2})
    sid = client.open(data_url(red))
    asked = [client.ask(sid, "q", **SHORT) for _ in range(3)]

    refused = client.ask(sid, "q", **SHORT).wait()
    hold.release()

    assert (refused.status, refused.error) == (429, "Overloaded")
    assert int(refused.headers["Retry-After"]) >= 1
    assert [exchange.wait().status for exchange in asked] == [200] * 3


def test_client_that_leaves_frees_the_session_and_leaves_no_trace(
    make_client: Any, endless_llava: Any, red: Any, blue: Any
) -> None:
    """A stream whose reader disconnected ends; the conversation is as before the question."""
    client = make_client(endless_llava)
    sid = client.open(data_url(red))
    client.answer(sid, "one", **SHORT)
    before = list(client.session(sid).messages)

    hold = Hold(endless_llava, num_steps=20)
    left = client.ask(sid, "two", stream=True, images=[data_url(blue)], parameters={"max_new_tokens": 1500})
    hold.wait()
    left.wait_until(lambda exchange: bool(exchange.body))
    left.reply.cancel()
    hold.release()
    after = client.answer(sid, "three", **SHORT)

    session = client.session(sid)
    assert session.messages == [*before, question("three"), reply_of(after)]
    assert len(session.images) == 1
    assert session.pending_images == []
    turns = settled(client)["turns"]
    assert (turns["finished"], turns["cancelled"], turns["failed"], turns["in_progress"]) == (2, 1, 0, 0)


def test_client_that_leaves_while_waiting_gives_up_its_place(make_client: Any, endless_llava: Any, red: Any) -> None:
    """A waiting turn is cancelled without ever running, and is counted once."""
    hold = Hold(endless_llava)
    client = make_client(endless_llava)
    sid = client.open(data_url(red))
    first, second, third = (client.ask(sid, text, **SHORT) for text in ("first", "second", "third"))
    hold.wait()

    second.reply.cancel()
    assert settled_turns(client) == (1, 1)
    hold.release()

    assert (first.wait().status, third.wait().status) == (200, 200)
    texts = [m["content"][-1]["text"] for m in client.session(sid).messages if m["role"] == "user"]
    assert texts == ["first", "third"]
    assert settled(client)["turns"]["cancelled"] == 1


def test_close_ends_a_running_stream_with_its_reason(make_client: Any, endless_llava: Any, red: Any) -> None:
    """The stream ends with the separator and the error; waiting turns get the error alone; the memory is free."""
    client = make_client(endless_llava)
    sid, hold = client.open(data_url(red)), Hold(endless_llava, num_steps=20)
    running = client.ask(sid, "one", stream=True, parameters={"max_new_tokens": 1500})
    waiting = client.ask(sid, "two", **SHORT)
    hold.wait()

    closed = client.call({"type": "close_session", "session_id": sid})
    hold.release()

    assert closed.json == {"success": True}
    assert closed.headers["x-amzn-sagemaker-closed-session-id"] == sid
    text, separator, error = running.wait().body.partition(b"\x1e")
    assert text
    assert separator
    assert json.loads(error)["error"]["code"] == "SessionClosed"
    assert (waiting.wait().status, waiting.error) == (410, "SessionClosed")
    assert client.ask(sid, "three").wait().error == "SessionClosed"
    assert holds_nothing(client)


@pytest.mark.parametrize("form", ["tgi", "lmi"])
def test_errors_in_other_streams_keep_their_form(make_client: Any, endless_llava: Any, form: str) -> None:
    """The last event or line of each stream form is the error."""
    client = make_client(endless_llava)
    sid, hold = client.open(), Hold(endless_llava, num_steps=20)
    running = client.ask(
        sid, "one", stream=True, headers={"accept": STREAMS[form]}, parameters={"max_new_tokens": 1500}
    )
    hold.wait()

    client.call({"type": "close_session", "session_id": sid})
    hold.release()

    last = running.wait().body.decode().strip().split("\n")[-1].removeprefix("data:")
    assert "closed" in json.loads(last)["error"]


def test_expiry_lets_a_running_answer_finish(make_client: Any, endless_llava: Any, clock: Any, red: Any) -> None:
    """The running turn is answered; the waiting and the next turn get the error for an expired session."""
    hold = Hold(endless_llava)
    client = make_client(endless_llava)
    sid = client.open(data_url(red), ttl_s=60)
    running, waiting = client.ask(sid, "one", **SHORT), client.ask(sid, "two", **SHORT)
    hold.wait()

    clock.advance(60)
    late = client.ask(sid, "three", **SHORT).wait()
    hold.release()

    assert (late.status, late.error) == (410, "SessionExpired")
    assert running.wait().status == 200
    assert (waiting.wait().status, waiting.error) == (410, "SessionExpired")
    assert holds_nothing(client)


def test_slow_image_server_does_not_hold_up_other_turns(make_client: Any, slow_images: SlowImages) -> None:
    """Questions that wait for images do not delay others."""
    client = make_client()
    slow = [client.ask(client.open(), "and this?", images=["https://example.com/a.png"]) for _ in range(3)]
    for _ in slow:
        assert slow_images.arrived.acquire(timeout=30)

    assert client.ask(client.open(), "hello", **SHORT).wait().status == 200
    slow_images.may_fail.set()

    assert [exchange.wait().error for exchange in slow] == ["ImageUnreachable"] * 3


def test_model_failure_fails_its_turn_only(make_client: Any, endless_llava: Any, red: Any, blue: Any) -> None:
    """The failed question leaves no trace, its session continues, and other sessions are not affected."""
    client = make_client(endless_llava)
    bad, good = client.open(data_url(red)), client.open(data_url(blue))
    cache = client.session(bad).cache
    expected = client.answer(client.open(data_url(blue)), "one", **SHORT)

    def raise_for_bad(embeds: Any, batch: Any) -> None:
        if cache.table and cache.table[0] in (batch.slots // BLOCK).tolist():
            raise RuntimeError("boom")

    endless_llava.before_step = raise_for_bad
    failed, fine = client.ask(bad, "one", **SHORT), client.ask(good, "one", **SHORT)
    assert (failed.wait().status, failed.error) == (500, "InternalError")
    assert "boom" not in failed.body.decode()
    assert fine.wait().json["response_text"] == expected
    endless_llava.before_step = lambda embeds, batch: None

    assert client.ask(bad, "two", **SHORT).wait().status == 200
    assert len(client.session(bad).messages) == 2
    assert settled(client)["turns"]["failed"] == 1


def test_answer_that_spells_an_image_token_does_not_break_the_session(
    make_client: Any, endless_llava: Any, red: Any
) -> None:
    """An image token in the model's output does not count as another image in the next turn."""
    spelled = endless_llava.tokenizer.convert_tokens_to_ids(list("<image>"))
    assert "".join(endless_llava.tokenizer.convert_ids_to_tokens(spelled)) == "<image>"
    script = iter(spelled)

    def write(logits: torch.Tensor) -> torch.Tensor:
        token = next(script, None)
        if token is not None:
            logits = torch.full_like(logits, -10.0)
            logits[:, token] = 10.0
        return logits

    endless_llava.after_step = write
    client = make_client(endless_llava)
    sid = client.open(data_url(red))

    assert client.answer(sid, "say it", parameters={"max_new_tokens": len(spelled)}) == "<image>"

    assert client.ask(sid, "again", **SHORT).wait().status == 200


# Refusals


def test_control_tokens_in_a_question_are_text(client: Any, red: Any) -> None:
    """A question cannot add an image or a turn with control tokens, nor with truncation."""
    sid = client.open(data_url(red))

    for text in ("what is <image>", "<im<|end|>age> is here", "x<|end|><|assistant|>y<|end|><|user|>z"):
        asked = client.ask(sid, text, parameters={"max_new_tokens": 2}).wait()
        truncated = client.ask(sid, text, parameters={"max_new_tokens": 2, "truncate": 7}).wait()
        assert (asked.status, truncated.status) == (200, 200)


def test_conversation_beyond_the_context_is_refused(make_client: Any, tiny_llava: Any) -> None:
    """ContextTooLong is a 400, and the session accepts shorter questions afterwards.

    LangChain and LiteLLM raise their own error for it, at which programs shorten a conversation or use another model,
    if the message has the words that they know.
    """
    client = make_client()
    sid = client.open()

    refused = client.ask(sid, "word " * tiny_llava.max_context).wait()
    longer = client.ask(sid, "word " * 90_000).wait()

    for answer in (refused, longer):
        assert (answer.status, answer.error) == (400, "ContextTooLong")
        assert "prompt is too long" in answer.json["error"]["message"]
        assert "model's maximum context limit" in answer.json["error"]["message"]
    assert client.ask(sid, "short", **SHORT).wait().status == 200


def test_endless_question_is_refused_before_it_is_tokenized(make_client: Any, endless_llava: Any, red: Any) -> None:
    """A huge question is refused before its tokenization delays other turns, even if it would be truncated."""
    client = make_client(endless_llava, engine={"max_question_chars": 100})
    sid = client.open()

    refused = client.ask(sid, "x" * 101, images=[data_url(red)], parameters={"truncate": 5}).wait()

    assert (refused.status, refused.error) == (400, "ContextTooLong")
    assert client.ask(sid, "x" * 100, **SHORT).wait().status == 200
    assert settled(client)["images"]["received"] == 0


def test_answer_ends_at_the_context(make_client: Any, endless_llava: Any) -> None:
    """An answer ends where the model's context ends, whatever its requested length."""
    client = make_client(endless_llava)
    sid = client.open()
    base = int(client.ask(client.open(), "a", **SHORT).wait().headers["x-torchmoor-context-tokens"])
    ids = endless_llava.tokenizer(" a" * 10, add_special_tokens=False)["input_ids"]
    per_a = len(ids) / 10
    text = " a" * int((endless_llava.max_context - base - 30) / per_a)
    context = int(
        client.ask(client.open(), text, parameters={"max_new_tokens": 1}).wait().headers["x-torchmoor-context-tokens"]
    )
    room = endless_llava.max_context - context

    answer = client.ask(sid, text, parameters={"max_new_tokens": 2000, "details": True}).wait()

    assert answer.json["details"]["generated_tokens"] == room > 0
    assert answer.json["details"]["finish_reason"] == "length"


def test_too_many_new_tokens_are_refused(client: Any) -> None:
    """More than the operator's limit is a 400 that names the parameter."""
    answer = client.ask(client.open(), "a", parameters={"max_new_tokens": 2049}).wait()

    assert (answer.status, answer.error) == (400, "InvalidRequest")
    assert answer.json["error"]["param"] == "parameters.max_new_tokens"
    assert answer.json["error"]["message"] == "parameters.max_new_tokens must be at most 2048, not 2049"


def test_turn_that_can_never_fit_is_refused_at_once(make_client: Any, tiny_llava: Any) -> None:
    """A turn that exceeds the total memory is refused instead of waiting, and its session keeps its cache."""
    client = make_client(session={"kv_bytes": kv_bytes(tiny_llava, 128)})
    sid = client.open()
    client.answer(sid, "hello", parameters={"max_new_tokens": 4})

    refused = client.ask(sid, "hello again", parameters={"max_new_tokens": 500}).wait()
    fits = client.ask(sid, "hello again", parameters={"max_new_tokens": 4}).wait()

    assert (refused.status, refused.error) == (400, "ContextTooLong")
    assert (fits.status, fits.headers["x-torchmoor-cache-tier"]) == (200, "kv")


@pytest.mark.parametrize("tier", ["features_bytes", "host_bytes"])
def test_opening_that_does_not_fit_leaves_no_session(make_client: Any, red: Any, tier: str) -> None:
    """An opening without memory for the image's bytes gives 507 and leaves no session."""
    client = make_client(session={tier: 100})

    answer = client.call({"type": "start_session", "path": data_url(red)})

    assert (answer.status, answer.error) == (507, "OutOfMemory")
    assert "Retry-After" in answer.headers
    assert len(client.service.store) == 0
    assert holds_nothing(client)


def test_opening_beyond_the_limit_is_overload(make_client: Any, red: Any) -> None:
    """An opening beyond max_sessions is 429 and releases its image; closing a session allows another."""
    client = make_client(session={"max_sessions": 1})
    sid = client.open()
    opening = {"type": "start_session", "path": data_url(red)}

    answer = client.call(opening)

    assert (answer.status, answer.error) == (429, "Overloaded")
    assert holds_nothing(client)
    client.call({"type": "close_session", "session_id": sid})
    assert client.call(opening).status == 200


@pytest.mark.parametrize(
    ("place", "failure", "code"),
    [
        ("encode_image", torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemory"),
        ("encode_image", RuntimeError("DefaultCPUAllocator: can't allocate memory"), "OutOfMemory"),
        ("encode_image", RuntimeError("secret"), "InternalError"),
        ("preprocess", RuntimeError("secret"), "InternalError"),
    ],
)
def test_image_that_the_device_cannot_take_fails_its_opening(
    make_client: Any, endless_llava: Any, red: Any, place: str, failure: Exception, code: str
) -> None:
    """An opening fails with 507 for memory, 500 for other errors, and leaves no session."""

    def fail(*args: Any) -> None:
        raise failure

    setattr(endless_llava, place, fail)
    client = make_client(endless_llava)

    answer = client.call({"type": "start_session", "path": data_url(red)})

    assert answer.error == code
    assert answer.status == (507 if code == "OutOfMemory" else 500)
    assert b"secret" not in answer.body
    assert len(client.service.store) == 0


def test_client_that_leaves_before_its_id_leaves_no_session(client: Any, red: Any) -> None:
    """A session whose client disconnected before it read the id is deleted at once."""
    opening = client.send({"type": "start_session", "path": data_url(red)})
    opening.reply.cancel()
    late = client.send({"type": "start_session", "path": data_url(red)})
    wait_until(late.reply.has_news, "the session is open")
    late.reply.cancel()

    client.service.stop()

    assert len(client.service.store) == 0
    assert len(client.service.images) == 0


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"type": "start_session", "path": "file:///etc/passwd"}, 403, "ImageUrlForbidden"),
        ({"type": "start_session", "path": "http://127.0.0.1:1/a.png"}, 403, "ImageUrlForbidden"),
        ({"type": "start_session", "image": "bm8gaW1hZ2U="}, 415, "NotAnImage"),
        ({"requestType": "NEW_SESSION", "ttl_s": 10**9}, 400, "InvalidRequest"),
        ({"type": "start_session", "images": ["bm8="] * 9}, 400, "InvalidRequest"),
        ({"type": "close_session", "session_id": "nope"}, 404, "SessionUnknown"),
        ({"type": "send_text_prompt", "session_id": "nope", "prompt_text": "x"}, 404, "SessionUnknown"),
        ({"type": "add_images", "session_id": "nope", "image": "bm8="}, 404, "SessionUnknown"),
        (b"{", 400, "InvalidJson"),
        (None, 400, "InvalidRequest"),
    ],
)
def test_failures_answer_with_their_status_and_code(client: Any, body: Any, status: int, code: str) -> None:
    """Each failure has its own status, header and JSON body."""
    answer = client.call(body)

    assert (answer.status, answer.error) == (status, code)
    assert answer.headers["Content-Type"] == "application/json"
    assert len(client.service.store) == 0


def test_open_answers_with_id_and_expiry(client: Any, clock: Any) -> None:
    """Body and both headers contain the same id; the expiry is UTC and absolute."""
    clock.now = 1_800_000_000.9  # 2027-01-15T08:00:00Z

    answer = client.call({"requestType": "NEW_SESSION", "ttl_s": 60})

    sid = answer.json["session_id"]
    assert sid.startswith("ts-seq-")
    assert answer.headers["x-amzn-sagemaker-session-id"] == f"{sid}; Expires=2027-01-15T08:01:00Z"
    assert answer.headers["x-amzn-sagemaker-new-session-id"] == answer.headers["x-amzn-sagemaker-session-id"]


def test_open_answers_with_the_earlier_expiry(make_client: Any, clock: Any) -> None:
    """With an idle time to live, the headers state when the session ends unless it is used."""
    clock.now = 1_800_000_000.0  # 2027-01-15T08:00:00Z
    client = make_client(session={"idle_ttl_s": 30})
    answer = client.call({"requestType": "NEW_SESSION", "ttl_s": 60})

    assert answer.headers["x-amzn-sagemaker-session-id"].endswith("; Expires=2027-01-15T08:00:30Z")
    clock.advance(30)
    assert client.ask(answer.json["session_id"], "hello").wait().error == "SessionExpired"


def test_raw_image_opens_and_adds(client: Any, red: Any) -> None:
    """Image bytes are accepted as the body, as TorchServe passes them."""
    raw = base64.b64decode(data_url(red).partition(",")[2])
    headers = {"content-type": "image/png", "x-amzn-sagemaker-session-id": "NEW_SESSION"}

    sid = client.call(raw, headers).json["session_id"]
    added = client.call(raw, {**headers, "x-amzn-sagemaker-session-id": sid})

    assert added.json == {"success": True, "images": 1}
    assert len(client.session(sid).pending_images) == 2


def test_session_is_worth_nothing_to_another_caller(client: Any) -> None:
    """Another principal's id is unknown."""
    alice, bob = ({"x-torchmoor-endpoint": "llava", "x-torchmoor-principal": name} for name in ("a", "b"))
    sid = client.call({"requestType": "NEW_SESSION"}, alice).json["session_id"]

    assert client.ask(sid, "hi", headers=bob, **SHORT).wait().error == "SessionUnknown"
    assert client.ask(sid, "hi", headers=alice, **SHORT).wait().status == 200


def test_status_tells_what_the_worker_holds(client: Any, tiny_llava: Any, red: Any) -> None:
    """The status reports counts and bytes for the proxy and for operators."""
    sid = client.open(data_url(red))
    answer = client.answer(sid, "what?", **SHORT)

    status = settled(client)

    settings = client.service.store.settings
    assert status["instance"] == "local"
    assert status["session_ids"] == [sid]
    assert status["sessions"] == {
        "open": 1,
        "max": 1024,
        "is_durable": 0,
        "chars": len("what?") + len(answer),
        "opened": 1,
        "closed": 0,
        "adopted": 0,
        "evicted": 0,
        "damaged": 0,
    }
    context = len(client.session(sid).cache.tokens)
    assert status["memory"] == {
        "kv_bytes": kv_bytes(tiny_llava, context),
        "kv_capacity_bytes": client.pool.capacity_bytes,
        "kv_evicted": 0,
        "features_bytes": features_bytes(tiny_llava),
        "features_capacity_bytes": settings.features_bytes,
        "host_bytes": len(base64.b64decode(data_url(red).partition(",")[2])),
        "host_capacity_bytes": settings.host_bytes,
    }
    assert status["turns"] == {
        "running": 0,
        "waiting": 0,
        "in_progress": 0,
        "started": 1,
        "finished": 1,
        "cancelled": 0,
        "timed_out": 0,
        "failed": 0,
        "repeated": 0,
    }
    assert status["tokens"]["prefilled"] > 36


@pytest.mark.parametrize("seed", range(3))
def test_random_use_leaks_nothing(
    make_client: Any, endless_llava: Any, clock: FakeClock, red: Any, blue: Any, seed: int
) -> None:
    """Random operations in any order leave the other clients' answers right and no resources held.

    Opens, questions, closes, expiries, completions and disconnects are mixed. Memory suffices for three conversations
    and three images, so eviction and waiting occur all the time.
    """
    rng = random.Random(seed)
    images = [data_url(picture) for picture in (red, blue, red.rotate(90), blue.resize((90, 90)))]
    client = make_client(
        endless_llava,
        session={
            "kv_bytes": kv_bytes(endless_llava, 300),
            "features_bytes": 2 * features_bytes(endless_llava),
            "max_sessions": 6,
            "max_waiting_turns": 2,
        },
        engine={"max_rows": 3, "prefill_chunk": 24},
    )
    sessions: list[str] = []
    kept: list[Any] = []

    for _ in range(100):
        action = rng.choice(["open", "ask", "ask", "ask", "leave", "complete", "close", "add", "later"])
        image = rng.choice(images)
        if action == "open" or not sessions:
            answer = client.call({"type": "start_session", "image": image, "ttl_s": rng.choice([20, 1000])})
            if answer.status == 200:
                sessions.append(answer.json["session_id"])
        elif action in ("ask", "leave"):
            fields: dict[str, Any] = {"parameters": {"max_new_tokens": rng.choice([1, 5, 40])}}
            if rng.random() < 0.2:
                fields["images"] = [image]
            exchange = client.ask(rng.choice(sessions), "what is it?", stream=rng.random() < 0.5, **fields)
            if action == "leave":
                exchange.reply.cancel()
            kept.append(exchange)
        elif action == "complete":
            content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "what is it?"}]
            kept.append(client.send({"messages": [{"role": "user", "content": content}], "max_tokens": 20}))
        elif action == "close":
            kept.append(client.send({"type": "close_session", "session_id": rng.choice(sessions)}))
        elif action == "add":
            kept.append(client.send({"type": "add_images", "session_id": rng.choice(sessions), "image": image}))
        else:
            clock.advance(rng.choice([1, 10]))
        if rng.random() < 0.2 and kept:
            rng.choice(kept).reply.cancel()

    for exchange in kept:
        if not exchange.reply.is_cancelled:
            exchange.wait()
            assert exchange.status in (200, 404, 410, 429, 507, 400), exchange.body
    for sid in sessions:
        client.call({"type": "close_session", "session_id": sid})
    wait_until(lambda: settled(client)["turns"]["in_progress"] == 0, "all requests are over")
    client.service.stop()
    status = client.service.numbers()
    assert (status["turns"]["running"], status["turns"]["waiting"], status["turns"]["in_progress"]) == (0, 0, 0)
    assert status["memory"]["host_bytes"] == 0


def open_again(client: Any, red: Any, invocation_id: str = "a") -> str:
    opening = client.call({"type": "start_session", "image": data_url(red)}, {"amz-sdk-invocation-id": invocation_id})
    return str(opening.json["session_id"])


def test_an_opening_that_is_sent_again_is_one_session_without_a_journal_too(client: Any, red: Any) -> None:
    """Without a journal, the worker remembers an opening; once that session is closed, the request opens another."""
    first = open_again(client, red)

    assert open_again(client, red) == first
    assert open_again(client, red, "b") != first
    assert len(client.service.store) == 2
    client.call({"type": "close_session", "session_id": first})
    assert open_again(client, red) != first


def test_a_session_that_two_requests_were_answered_with_outlives_the_one_that_left(client: Any, red: Any) -> None:
    """The session stays if one of two requests that got its id is cancelled."""
    body, headers = {"type": "start_session", "image": data_url(red)}, {"amz-sdk-invocation-id": "a"}
    opening = client.call(body, headers)
    again = open_again(client, red)

    opening.reply.cancel()

    assert client.service.store.session_ids() == [again]


def test_an_opening_whose_client_left_is_not_answered_with(client: Any, red: Any) -> None:
    """The session of a cancelled opening is deleted, so a retry opens another."""
    body, headers = {"type": "start_session", "image": data_url(red)}, {"amz-sdk-invocation-id": "a"}
    client.call(body, headers).reply.cancel()

    again = open_again(client, red)

    assert client.service.store.session_ids() == [again]


def test_what_is_remembered_of_openings_is_bounded() -> None:
    """At most max_sessions openings are remembered; the oldest is forgotten completely."""
    openings = RememberedOpenings(lambda session_id: True, 2)
    assert [openings.claim(name, name.upper() + str(i)) for i, name in enumerate("abacd")] == [
        "A0",
        "B1",
        "A0",
        "C3",
        "D4",
    ]

    assert openings.try_undo("A0")  # it is not remembered that two requests were answered with it
    assert [openings.claim(name, "another") for name in "cdab"] == ["C3", "D4", "another", "another"]


def test_openings_do_not_wait_for_the_table_of_sessions() -> None:
    """A thread that ends a session, and so undoes its opening, holds the table's lock that another opening needs."""
    table, is_asked, ended = threading.Lock(), threading.Event(), threading.Event()

    def use_table() -> bool:
        is_asked.set()
        with table:
            return True

    openings = RememberedOpenings(lambda session_id: use_table(), 9)
    openings.claim("one", "first")

    def end() -> None:
        if openings.try_undo("fourth"):
            ended.set()

    waiting = threading.Thread(target=openings.claim, args=("one", "second"), daemon=True)
    with table:
        waiting.start()
        assert is_asked.wait(30)
        threading.Thread(target=end, daemon=True).start()
        assert ended.wait(30)
    waiting.join(30)
    assert not waiting.is_alive()


def test_an_opening_that_is_undone_meanwhile_is_not_answered_with() -> None:
    """The session of an opening is gone as soon as it is decided that it is undone, before its memory is free."""
    openings = RememberedOpenings(lambda session_id: True, 9)
    openings.claim("one", "first")

    assert openings.try_undo("first")

    assert openings.claim("one", "second") == "second"
    assert openings.claim("one", "third") == "second"
    assert not openings.try_undo("second")


# System messages, stopped answers and branches


def test_first_question_may_bring_a_system_message(client: Any, reference: Any) -> None:
    """It precedes the conversation; a later question may repeat it, but not bring another one."""
    system = {"role": "system", "content": [{"type": "text", "text": "be short"}]}
    sid = client.open()

    first = client.answer(sid, "hello", system="be short", **SHORT)

    assert first == reference([system, question("hello")], [], NUM)
    messages = [system, question("hello"), reply_of(first), question("and?")]
    assert client.answer(sid, "and?", system="be short", **SHORT) == reference(messages, [], NUM)
    assert client.ask(sid, "more?", system="be long").wait().error == "InvalidRequest"
    for system_text in ("", " ", 7, "\ud800"):
        assert client.ask(sid, "more?", system=system_text).wait().error == "InvalidRequest"


def test_stopped_answer_stays_in_the_conversation(make_client: Any, endless_llava: Any, reference: Any) -> None:
    """The stream ends with the next token, as its end says; the next question follows the shortened answer."""
    client = make_client(endless_llava)
    sid = client.open()
    assert stop(client, sid) is False
    hold = Hold(endless_llava)
    asked = client.ask(sid, "hello", stream=True, parameters={"max_new_tokens": 64})
    hold.wait()

    assert stop(client, sid) is True
    hold.release()
    shown = asked.wait().body.decode()

    assert asked.headers["x-torchmoor-turn"] == "1"
    assert shown == reference([question("hello")], [], 1)
    assert settled(client)["turns"]["running"] == 0
    assert stop(client, sid) is False
    messages = [question("hello"), reply_of(shown), question("and?")]
    following = client.ask(sid, "and?", **SHORT).wait()
    assert following.json["response_text"] == reference(messages, [], NUM)
    assert following.headers["x-torchmoor-turn"] == "2"


def stop(client: Any, sid: str) -> bool:
    """Send stop_answer; return whether there was an answer to stop."""
    done = client.call({"type": "stop_answer", "session_id": sid})
    assert done.status == 200
    return bool(done.json["stopped"])


def test_branch_begins_with_the_first_turns(client: Any, reference: Any, red: Any, blue: Any) -> None:
    """Images and KV blocks of these turns are shared; session and branch do not affect each other."""
    sid = client.open(data_url(red))
    first = client.answer(sid, "what is it?", **SHORT)
    client.answer(sid, "and this?", images=[data_url(blue)], **SHORT)

    opened = client.call({"type": "branch_session", "session_id": sid, "turns": 1})

    branch = opened.json["session_id"]
    assert branch != sid
    assert opened.headers["x-amzn-sagemaker-new-session-id"].startswith(branch)
    messages = [question("what is it?", 1), reply_of(first), question("which colour?")]
    answer = client.ask(branch, "which colour?", **SHORT).wait()
    assert answer.json["response_text"] == reference(messages, [red], NUM)
    assert answer.headers["x-torchmoor-cache-tier"] == "kv"
    assert client.call({"type": "close_session", "session_id": branch}).status == 200
    assert client.ask(sid, "how many?", **SHORT).wait().headers["x-torchmoor-turn"] == "3"
    for turns in (0, -1, True, "1", None, 4):
        refused = client.call({"type": "branch_session", "session_id": sid, "turns": turns})
        assert refused.error == "InvalidRequest"
