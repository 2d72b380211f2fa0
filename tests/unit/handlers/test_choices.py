"""Several answers to one request that end together."""

import threading
from typing import Any

import pytest

from handlers.chat.adapters import AdapterUse
from handlers.chat.dialects.chat_completions import ChatCompletionForm
from handlers.chat.forms import Summary, Token

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
    """Otherwise the adapter would be fetched for no request, and the wait would count against the limit."""
    loading = Loading()
    use = AdapterUse(loading)
    use.wait("adapter-000", lambda: None, lambda error: None)

    end(use)
    use.release()

    assert loading.num_withdrawn == 1
