"""Several answers to one request that end together."""

import json
import threading
from typing import Any

import pytest

from handlers.chat.adapters import AdapterUse
from handlers.chat.dialects.chat_completions import ChatCompletionForm
from handlers.chat.forms import Summary, Token
from handlers.chat.turns.choices import Choices, _ChoiceReply, _SharedPrompt
from handlers.requests.reply import PendingReply

NUM_TOKENS = 3
BODY = {
    "messages": [{"role": "user", "content": "hello"}],
    "model": "llava",
    "n": 2,
    "stream": True,
    "temperature": 50.0,
    "seed": 5,
    "max_tokens": NUM_TOKENS,
}
COMPLETION = {"model": "llava", "n": 2, "temperature": 50.0, "seed": 5, "max_tokens": 9}


def test_a_choice_that_encodes_its_end_slowly_is_complete(
    make_client: Any, endless_llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream does not end before each choice has sent its last token and its finish_reason."""
    encode, is_slow, go_on = ChatCompletionForm.part, threading.Event(), threading.Event()

    def encode_slowly(form: ChatCompletionForm, token: Token, summary: Summary | None) -> bytes:
        if summary is not None and form.index:
            is_slow.set()
            assert go_on.wait(30)
        elif summary is not None:
            assert is_slow.wait(30)
        return encode(form, token, summary)

    monkeypatch.setattr(ChatCompletionForm, "part", encode_slowly)
    exchange = make_client(endless_llava).send(BODY)
    exchange.wait_until(lambda each: b'"finish_reason":"length"' in each.body)
    go_on.set()
    body = exchange.wait().body

    assert body.count(b'"finish_reason":"length"') == 2
    assert body.endswith(b"data: [DONE]\n\n")


def test_tool_calls_of_several_choices_have_their_own_ids(make_client: Any) -> None:
    """A client that answers a call names it by its id."""
    schema = {"type": "object", "properties": {"colour": {"type": "string", "maxLength": 9}}}
    tools = [{"type": "function", "function": {"name": "paint", "parameters": schema}}]
    body = {**BODY, "stream": False, "tools": tools, "tool_choice": "required", "max_tokens": 90}

    answer = make_client().call(body).json

    calls = [call["id"] for choice in answer["choices"] for call in choice["message"].get("tool_calls", ())]
    assert len(set(calls)) == len(calls) >= 2


@pytest.mark.parametrize("is_streaming", [False, True])
def test_each_prompt_is_answered_as_in_a_request_of_its_own(make_client: Any, is_streaming: bool) -> None:
    """Each prompt has the seeds and choices of a request of its own; the usage is the sum."""
    client = make_client()
    prompts = ["A red circle", "Two green squares stand", "Describe"]
    alone = [client.call({**COMPLETION, "prompt": each}).json for each in prompts]

    body = {**COMPLETION, "prompt": prompts, "stream": is_streaming}
    if is_streaming:
        texts, usage = read_stream(client.call({**body, "stream_options": {"include_usage": True}}).body, 6)
    else:
        answer = client.call(body).json
        texts, usage = [choice["text"] for choice in answer["choices"]], answer["usage"]
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))

    assert texts == [choice["text"] for each in alone for choice in each["choices"]]
    assert len(set(texts)) == len(texts)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == sum(each["usage"][name] for each in alone)


def read_stream(body: bytes, num_choices: int) -> tuple[list[str], Any]:
    """Return the choices' texts and the usage of a stream that has ended."""
    *lines, done = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert done == b"[DONE]"
    texts, chunks = [""] * num_choices, [json.loads(line) for line in lines]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts, chunks[-1]["usage"]


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_prompt_that_is_too_long_fails_the_request(make_client: Any, place: int, is_streaming: bool) -> None:
    """A prompt that is too long fails the request and stops the other prompts' answers."""
    prompts = ["A red circle", "Describe"]
    prompts.insert(place, "word " * 5000)

    answer = make_client().call({**COMPLETION, "prompt": prompts, "stream": is_streaming})

    assert b"tokens" in answer.body
    assert b"[DONE]" not in answer.body


def test_a_prompt_that_fails_as_another_one_is_answered_fails_the_request(
    make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request fails although another prompt's first token arrives while the error is being written."""
    is_answered, is_failing, has_begun = threading.Event(), threading.Event(), threading.Event()
    start, begin, finish = _SharedPrompt.start, Choices.begin, PendingReply.finish

    def start_late(prompt: _SharedPrompt) -> None:
        assert not prompt.answers[0].choice or is_answered.wait(30)
        start(prompt)

    def begin_late(choices: Choices, headers: Any) -> None:
        is_answered.set()
        assert is_failing.wait(30)
        begin(choices, headers)
        has_begun.set()

    def finish_late(reply: PendingReply, *args: Any) -> None:
        if not isinstance(reply, _ChoiceReply):
            is_failing.set()
            assert has_begun.wait(30)
        finish(reply, *args)

    monkeypatch.setattr(_SharedPrompt, "start", start_late)
    monkeypatch.setattr(Choices, "begin", begin_late)
    monkeypatch.setattr(PendingReply, "finish", finish_late)
    answer = make_client().call({**COMPLETION, "prompt": ["Describe", "word " * 5000], "stream": True})

    assert (answer.status, b"tokens" in answer.body) == (400, True)


def test_a_session_has_one_prompt_at_a_time(make_client: Any) -> None:
    answer = make_client().call({"prompt": ["a", "b"]}, {"x-amzn-sagemaker-session-id": "NEW_SESSION"})

    assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")


class Loading:
    """Adapters that are still loading."""

    def __init__(self) -> None:
        self.num_withdrawn = 0

    def acquire(self, name: str, on_ready: Any, on_failed: Any) -> Any:
        def withdraw() -> None:
            self.num_withdrawn += 1

        return withdraw

    def status(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("end", [AdapterUse.try_end, AdapterUse.release])
def test_an_answer_that_ends_withdraws_its_wait_for_an_adapter(end: Any) -> None:
    """An ended answer stops its wait for an adapter, so that it is not fetched in vain and no longer counts."""
    loading = Loading()
    use = AdapterUse(loading)
    use.wait("adapter-000", lambda: None, lambda error: None)

    end(use)
    use.release()

    assert loading.num_withdrawn == 1
