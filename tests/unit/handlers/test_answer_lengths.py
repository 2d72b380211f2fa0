"""Answers of the length that a request asks for, by the chat service with the demo model."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.handlers.conftest import Client
from torchmoor.wire import headers as wire

CREATE = {wire.RESOURCE: "POST responses"}
MESSAGES = [{"role": "user", "content": "What color is the circle?"}]
PROMPT = "<s><|user|>What color is the circle?<|end|><|assistant|>"
MAX = 20  # the model ends its answer before

Lengths = tuple[str, int, str]  # an answer's text, number of tokens, and finish reason


def chat(client: Client, **fields: Any) -> Lengths:
    answer = client.call({"model": "llava", "messages": MESSAGES, "max_tokens": MAX, **fields}).json
    [choice] = answer["choices"]
    return choice["message"]["content"], answer["usage"]["completion_tokens"], choice["finish_reason"]


def complete(client: Client, **fields: Any) -> Lengths:
    answer = client.call({"model": "llava", "prompt": PROMPT, "max_tokens": MAX, **fields}).json
    [choice] = answer["choices"]
    return choice["text"], answer["usage"]["completion_tokens"], choice["finish_reason"]


def respond(client: Client, **fields: Any) -> Lengths:
    body = {"model": "llava", "input": MESSAGES, "max_output_tokens": MAX, "store": False, **fields}
    answer = client.call(body, CREATE).json
    reason = "stop" if answer["status"] == "completed" else "length"
    return answer["output"][-1]["content"][0]["text"], answer["usage"]["output_tokens"], reason


def generate(client: Client, **fields: Any) -> Lengths:
    parameters = {"max_new_tokens": MAX, "details": True, **fields}
    [answer] = client.call({"inputs": PROMPT, "parameters": parameters}).json
    return answer["generated_text"], answer["details"]["generated_tokens"], answer["details"]["finish_reason"]


def take_turn(client: Client, **fields: Any) -> Lengths:
    body = {
        "type": "send_text_prompt",
        "session_id": client.open(),
        "prompt_text": "What color is the circle?",
        "parameters": {"max_new_tokens": MAX, "details": True, **fields},
    }
    answer = client.call(body).json
    return answer["response_text"], answer["details"]["generated_tokens"], answer["details"]["finish_reason"]


@pytest.mark.parametrize("ask", [chat, complete, respond, generate, take_turn])
def test_an_answer_has_the_length_that_its_request_asks_for(client: Client, ask: Callable[..., Lengths]) -> None:
    """The text begins as that of the answer that ends by itself."""
    text, number, reason = ask(client)
    assert number < MAX - 2
    assert reason in ("stop", "eos_token")

    longest, least = ask(client, ignore_eos=True), ask(client, min_tokens=number + 2)

    assert longest[1:] == (MAX, "length")
    assert number + 2 <= least[1] <= MAX
    assert longest[0].startswith(text)
    assert least[0].startswith(text)
    assert "</s>" not in longest[0] + least[0]
    assert ask(client, min_tokens=0, ignore_eos=False) == (text, number, reason)


@pytest.mark.parametrize("ask", [chat, generate])
def test_a_stop_string_does_not_count_before_the_least_length(client: Client, ask: Callable[..., Lengths]) -> None:
    text = ask(client, ignore_eos=True)[0]
    stop = [text.strip()[0]]
    assert ask(client, stop=stop, ignore_eos=True)[0] == text[: text.index(stop[0])]

    shown, number, _ = ask(client, stop=stop, min_tokens=12)

    assert number > 12
    assert stop[0] in shown
    assert ask(client, stop=stop, min_tokens=MAX)[1:] == (MAX, "length")


@pytest.mark.parametrize("kind", ["messages", "inputs"])
def test_a_least_length_above_the_maximum_is_refused(client: Client, kind: str) -> None:
    """The maximum is the request's or, without one, the default; a stream is refused before it begins."""
    lengths = {"max_tokens": 5, "min_tokens": 6} if kind == "messages" else {"min_new_tokens": 100_000}
    body = {"messages": MESSAGES, **lengths} if kind == "messages" else {"inputs": "Hello", "parameters": lengths}

    for is_streaming in (False, True):
        refused = client.call({**body, "stream": is_streaming})
        assert (refused.status, refused.error) == (400, "InvalidRequest")
        assert b"min_tokens must be at most" in refused.body


def test_an_answer_ends_with_its_grammar(client: Client) -> None:
    """Also if the grammar allows more: the end token ends it there."""
    grammar = {"type": "regex", "value": "[a-c]{2,3}"}

    text, number, reason = generate(client, grammar=grammar, ignore_eos=True, min_tokens=MAX)

    assert 2 <= len(text) <= 3
    assert number < MAX
    assert reason == "eos_token"
