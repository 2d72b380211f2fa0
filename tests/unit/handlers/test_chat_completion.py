"""Answers without a session: raw prompts and whole conversations, what they share and what they leave behind."""

import json
import threading
from typing import Any

import pytest
import torch
from PIL import Image

from handlers.chat.intake import ImageIntake
from handlers.errors import ImageUnreachable
from tests.unit.handlers.test_chat_service import (
    SHORT,
    Hold,
    data_url,
    features_bytes,
    kv_bytes,
    question,
    reply_of,
    settled,
)

NUM = 16
GREEDY = {"parameters": {"max_new_tokens": NUM}}


def user(text: str, *images: Image.Image) -> dict[str, Any]:
    """A user's message as OpenAI's clients write it."""
    urls = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return {"role": "user", "content": [*urls, {"type": "text", "text": text}]}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), "max_tokens": NUM, **fields}


def said(exchange: Any) -> str:
    """The text of a chat completion."""
    assert exchange.status == 200, exchange.body
    text: str = exchange.json["choices"][0]["message"]["content"]
    return text


def generated(exchange: Any) -> str:
    """The text of an answer to `inputs`."""
    assert exchange.status == 200, exchange.body
    text: str = exchange.json[0]["generated_text"]
    return text


# Answers


def test_raw_prompt_is_continued_as_transformers_does(client: Any, reference: Any) -> None:
    """`inputs` go to the tokenizer as they are; the beginning-of-sequence token is there once, given or not."""
    prompt = "<|user|>what is a circle?<|end|><|assistant|>"

    for text in (prompt, "<s>" + prompt, "a red circle is"):
        expected = reference.complete(text, [], NUM, adds_special=not text.startswith("<s>"))
        assert generated(client.call({"inputs": text, **GREEDY})) == expected


def test_image_in_a_raw_prompt_is_seen_where_it_stands(client: Any, reference: Any, red: Any, blue: Any) -> None:
    """TGI's markdown; one image, or several in their order."""
    answers = []
    for images in ([red], [blue], [red, blue], [blue, red]):
        addresses = "".join(f"![]({data_url(image)})" for image in images)
        prompt = f"<|user|>{addresses}what is it?<|end|><|assistant|>"
        answers.append(generated(client.call({"inputs": prompt, **GREEDY})))

        marks = "<image>" * len(images)
        assert answers[-1] == reference.complete(f"<|user|>{marks}what is it?<|end|><|assistant|>", images, NUM)

    assert answers[0] != answers[1]


def test_conversation_is_answered_as_transformers_does(client: Any, reference: Any, red: Any, blue: Any) -> None:
    """OpenAI's messages with images in them, also in the middle of the conversation."""
    messages = [question("what is it?", 1)]
    first = said(client.call(chat(user("what is it?", red))))
    assert first == reference(messages, [red], NUM)

    messages += [reply_of(first), question("and this?", 1)]
    second = said(client.call(chat(user("what is it?", red), assistant(first), user("and this?", blue))))
    assert second == reference(messages, [red, blue], NUM)


def test_streamed_completion_equals_the_whole(client: Any, red: Any) -> None:
    """The chunks' texts are the answer's."""
    whole = said(client.call(chat(user("what is it?", red))))

    streamed = client.call(chat(user("what is it?", red), stream=True))

    chunks = [json.loads(line[6:]) for line in streamed.body.decode().split("\n\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    assert streamed.body.endswith(b"data: [DONE]\n\n")


def test_truncate_keeps_the_last_tokens_of_a_prompt(client: Any, reference: Any, tiny_llava: Any) -> None:
    """With the marks of a conversation that the client wrote among them."""
    prompt = "one two three<|end|><|user|>what is a circle?<|end|><|assistant|>"
    ids = tiny_llava.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    kept = len(ids) - 3

    found = client.call({"inputs": prompt, "parameters": {"max_new_tokens": NUM, "truncate": kept}})

    expected = reference.complete(tiny_llava.tokenizer.decode(ids[3:]), [], NUM)
    assert generated(found) == expected
    assert int(found.headers["X-Torchmoor-Context-Tokens"]) == kept


def test_completions_and_sessions_answer_the_same(client: Any, red: Any) -> None:
    """One conversation in two dialects."""
    text = client.answer(client.open(data_url(red)), "what is it?", **SHORT)

    assert said(client.call(chat(user("what is it?", red)))) == text


# What is shared


def test_conversation_sent_again_costs_what_is_new(client: Any, reference: Any, red: Any) -> None:
    """A second request that repeats the conversation and adds a turn computes little more than that turn."""
    first = client.call(chat(user("what is it?", red)))
    text = said(first)
    again = client.call(chat(user("what is it?", red), assistant(text), user("what colour is it?")))

    messages = [question("what is it?", 1), reply_of(text), question("what colour is it?")]
    assert said(again) == reference(messages, [red], NUM)
    new = int(again.headers["X-Torchmoor-Context-Tokens"]) - int(first.headers["X-Torchmoor-Context-Tokens"])
    assert int(again.headers["X-Torchmoor-Prefill-Tokens"]) <= new + 16  # a block that was not full
    assert settled(client)["images"]["encoded"] == 1


def test_completion_after_a_session_shares_with_it(client: Any, red: Any) -> None:
    """The same caller's conversation about the same picture, in whatever dialect."""
    client.answer(client.open(data_url(red)), "what is it?", **SHORT)

    shared = client.call(chat(user("what colour?", red))).headers

    reused = int(shared["X-Torchmoor-Context-Tokens"]) - int(shared["X-Torchmoor-Prefill-Tokens"])
    assert reused == 48  # the whole blocks of the picture and what stands before it
    assert settled(client)["images"]["encoded"] == 1


def test_callers_share_nothing(client: Any, red: Any) -> None:
    """Another principal cannot learn by the time that it takes whether somebody has this picture."""
    mine, theirs = ({"x-torchmoor-endpoint": "e", "x-torchmoor-principal": name} for name in ("mine", "theirs"))
    client.call(chat(user("what is it?", red)), mine)

    found = client.call(chat(user("what is it?", red)), theirs)

    assert found.headers["X-Torchmoor-Prefill-Tokens"] == found.headers["X-Torchmoor-Context-Tokens"]
    assert settled(client)["images"]["encoded"] == 2
    again = client.call(chat(user("what is it?", red)), mine)
    assert int(again.headers["X-Torchmoor-Prefill-Tokens"]) <= 16


def test_images_and_blocks_are_left_for_whoever_needs_them(make_client: Any, tiny_llava: Any, red: Any) -> None:
    """Nothing is held for a request that is over; what stays goes when others need its room."""
    client = make_client(session={"features_bytes": features_bytes(tiny_llava), "kv_bytes": kv_bytes(tiny_llava, 100)})
    for angle in range(0, 180, 30):
        said(client.call(chat(user("what is it?", red.rotate(angle, fillcolor="white")))))

    memory = settled(client)["memory"]
    assert memory["host_bytes"] == 0
    assert memory["features_bytes"] == features_bytes(tiny_llava)
    assert memory["kv_evicted"] >= 4
    client.service.store.check_integrity()


def test_session_on_a_picture_of_a_completion_outlives_its_features(
    make_client: Any, tiny_llava: Any, reference: Any, red: Any, blue: Any
) -> None:
    """The session keeps the picture's bytes, though the completion had it first and left none."""
    client = make_client(session={"features_bytes": features_bytes(tiny_llava), "kv_bytes": kv_bytes(tiny_llava, 100)})
    client.call(chat(user("what is it?", red)))
    sid = client.open(data_url(red))
    client.call(chat(user("what is it?", blue)))

    found = client.ask(sid, "which colour?", **SHORT).wait()

    assert found.headers["X-Torchmoor-Cache-Tier"] == "encoded"
    assert found.json["response_text"] == reference([question("which colour?", 1)], [red], NUM)


# Refusals and failures


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": "what is <image>?"},
        {"inputs": "![](data:image/png;base64,)<image>"},
        {"messages": [{"role": "user", "content": "what is <image>?"}]},
        {"messages": [{"role": "system", "content": "<image>"}, {"role": "user", "content": "what?"}]},
        {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "an <image>"}]},
    ],
)
def test_text_cannot_claim_to_be_an_image(client: Any, body: Any) -> None:
    """What stands for an image in the model's vocabulary is refused in texts, with or without images beside it."""
    answer = client.call(body)

    assert (answer.status, answer.error) == (400, "InvalidRequest")
    assert "<image>" in answer.json["error"]["message"]


def test_text_beside_an_image_cannot_claim_to_be_one(client: Any, red: Any) -> None:
    """Else the picture would be seen where the text says."""
    for body in (
        chat(user("what is <image>?", red)),
        {"inputs": f"<|user|><image>![]({data_url(red)})what?<|end|><|assistant|>"},
    ):
        assert client.call(body).error == "InvalidRequest"


def test_truncate_cannot_make_up_an_image(client: Any) -> None:
    """Cut texts are looked at again."""
    answer = client.call({"inputs": "<im<|end|>age>" * 3, "parameters": {"truncate": 30, "max_new_tokens": 2}})

    assert answer.status in (200, 400)


def test_request_may_bring_as_many_images_as_its_own_limit_says(make_client: Any, red: Any) -> None:
    """handler.request.max_images, whatever a session may have."""
    client = make_client(session={"max_images": 1}, request={"max_images": 2})

    assert client.call(chat(user("what?", red, red.rotate(90)))).status == 200
    prompt = "".join(f"![]({data_url(red.rotate(angle))})" for angle in (0, 90, 180))
    for body in (chat(user("what?", red, red, red)), {"inputs": prompt}):
        assert client.call(body).error == "InvalidRequest"
    assert settled(client)["images"]["received"] == 2


def test_prompt_longer_than_the_model_reads_is_refused(client: Any, tiny_llava: Any) -> None:
    """ContextTooLong, for both dialects."""
    text = "word " * tiny_llava.max_context

    for body in ({"inputs": text}, chat(user(text))):
        answer = client.call(body)
        assert (answer.status, answer.error) == (400, "ContextTooLong")


def test_bad_image_fails_its_request_only(client: Any, red: Any) -> None:
    """Those before it in the same request are let go of."""
    content = [
        {"type": "image_url", "image_url": {"url": data_url(red)}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm8="}},
    ]

    answer = client.call({"messages": [{"role": "user", "content": content}]})

    assert (answer.status, answer.error) == (415, "NotAnImage")
    client.service.store.check_integrity()
    assert settled(client)["turns"]["failed"] == 1


def test_client_that_leaves_ends_its_completion(make_client: Any, endless_llava: Any, red: Any) -> None:
    """Within a step; the images are let go of, and what was computed may be shared."""
    client = make_client(endless_llava)
    left = client.send(chat(user("what is it?", red), stream=True, max_tokens=1500))
    left.wait_until(lambda exchange: len(exchange.pieces) > 2)

    left.reply.cancel()

    again = client.call(chat(user("what is it?", red))).headers
    assert int(again["X-Torchmoor-Prefill-Tokens"]) <= 16
    turns = settled(client)["turns"]
    assert (turns["cancelled"], turns["finished"], turns["in_progress"]) == (1, 1, 0)
    client.service.store.check_integrity()


@pytest.mark.parametrize("is_raw", [True, False])
def test_client_that_leaves_before_its_images_are_there_costs_no_step(
    make_client: Any, endless_llava: Any, red: Any, monkeypatch: pytest.MonkeyPatch, is_raw: bool
) -> None:
    """Cancelled while composing: nothing reaches the engine, and what was loaded is let go of."""
    arrived, may_go_on = threading.Event(), threading.Event()
    read = ImageIntake.read

    def slow_read(self: ImageIntake, reference: Any) -> bytes:
        arrived.set()
        assert may_go_on.wait(30)
        return read(self, reference)

    monkeypatch.setattr(ImageIntake, "read", slow_read)
    client = make_client(endless_llava)
    left = client.send({"inputs": f"![]({data_url(red)})what?"} if is_raw else chat(user("what?", red)))
    assert arrived.wait(30)
    left.reply.cancel()
    may_go_on.set()
    client.service._loading.shutdown()
    client.service._preparing.shutdown()

    turns = settled(client)["turns"]
    assert (turns["cancelled"], turns["in_progress"], endless_llava.num_steps) == (1, 0, 0)


@pytest.mark.parametrize("is_raw", [True, False])
def test_slow_image_servers_of_completions_hold_up_nobody_else(
    make_client: Any, monkeypatch: pytest.MonkeyPatch, is_raw: bool
) -> None:
    """More requests that wait for their images than there are threads for the quick ones."""
    arrived, may_go_on = threading.Semaphore(0), threading.Event()

    def slow_read(self: ImageIntake, reference: Any) -> bytes:
        arrived.release()
        assert may_go_on.wait(30)
        raise ImageUnreachable("too slow")

    monkeypatch.setattr(ImageIntake, "read", slow_read)
    client = make_client()
    content = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    body = {"inputs": "![](https://example.com/a.png)"} if is_raw else chat({"role": "user", "content": content})
    slow = [client.send(body) for _ in range(3)]
    for _ in slow:
        assert arrived.acquire(timeout=30)

    assert client.call({"inputs": "hello", **GREEDY}).status == 200
    may_go_on.set()

    assert [exchange.wait().error for exchange in slow] == ["ImageUnreachable"] * 3


def test_model_failure_fails_its_completion_only(make_client: Any, endless_llava: Any, red: Any) -> None:
    """A neighbour notices nothing, and the same request succeeds afterwards."""
    client = make_client(endless_llava)
    expected = generated(client.call({"inputs": "hello", **GREEDY}))
    failing = threading.Event()

    def fail(embeds: torch.Tensor, batch: Any) -> None:
        if failing.is_set() and any(part.num_tokens > 40 for part in batch.parts):
            raise RuntimeError("boom")

    endless_llava.before_step = fail
    failing.set()
    bad, good = client.send(chat(user("what is it?", red))), client.send({"inputs": "hello", **GREEDY})

    assert (bad.wait().status, bad.error) == (500, "InternalError")
    assert generated(good.wait()) == expected
    failing.clear()
    assert client.call(chat(user("what is it?", red))).status == 200


def test_completion_that_runs_out_of_time_lets_go(make_client: Any, endless_llava: Any, red: Any) -> None:
    """504, and nothing is held."""
    hold = Hold(endless_llava)
    client = make_client(endless_llava, engine={"turn_timeout_s": 0.2})
    late = client.send(chat(user("what is it?", red)))
    hold.wait()
    threading.Event().wait(0.25)
    hold.release()

    assert (late.wait().status, late.error) == (504, "TurnTimedOut")
    client.service.store.check_integrity()
