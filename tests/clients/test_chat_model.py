"""ChatSagemakerEndpoint and its sessions, against a scripted client."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from pydantic import ValidationError

from tests.clients.fake_runtime import Body, FakeRuntime, openai_stream, refusal, tgi_stream
from torchmoor.clients.errors import EndpointError, SessionMismatch, StreamCut
from torchmoor.clients.langchain import ChatSagemakerEndpoint, ChatSagemakerSession, SagemakerAsyncEndpoint
from torchmoor.clients.langchain.threads import MAX_AHEAD, read_in_thread

PNG = "data:image/png;base64,AAAA"


def model(*answers: Any, **fields: Any) -> tuple[ChatSagemakerEndpoint, FakeRuntime]:
    runtime = FakeRuntime(*answers)
    return ChatSagemakerEndpoint(endpoint_name="llava", client=runtime, **fields), runtime


def session(*answers: Any) -> tuple[ChatSagemakerSession, FakeRuntime]:
    chat, runtime = model({"NewSessionId": "ts-seq-1; Expires=2030-01-01T00:00:00Z"}, *answers)
    return chat.open_session(), runtime


def test_answers_come_in_chunks_with_usage() -> None:
    """Each token is a chunk; the merged message has the usage and the finish reason."""
    chat, _ = model(openai_stream("grö", "ßer ", "€"))

    chunks = list(chat.stream("?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk

    assert [chunk.text for chunk in chunks if chunk.text] == ["grö", "ßer ", "€"]
    assert whole.usage_metadata == {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.response_metadata["model_name"] == "llava"


def test_invoke_is_the_stream_put_together() -> None:
    """A whole answer has the same text and counts as its stream."""
    chat, _ = model(openai_stream("a", "b"))

    message = chat.invoke("?")

    assert message.text == "ab"
    assert message.usage_metadata["output_tokens"] == 2


def test_a_session_streams_as_its_model_does() -> None:
    """LangChain waits for the whole answer if streaming is set to False, so only settings that were made are copied."""
    chat, _ = session(tgi_stream("a", "b"))

    assert [chunk.text for chunk in chat.stream("?") if chunk.text] == ["a", "b"]


@pytest.mark.parametrize("is_session", [True, False])
def test_chunks_have_their_tokens_and_log_probabilities(is_session: bool) -> None:
    """Those that the server sends: in a session both, in OpenAI's form no ids. A merged answer has those of all."""
    answers = [tgi_stream("a", "b"), tgi_stream("a", "b")] if is_session else [with_logprobs(), with_logprobs()]
    chat, _ = session(*answers) if is_session else model(*answers, model_kwargs={"logprobs": True})
    expected = [{"token_ids": [1], "logprobs": [0.0]}] * 2 if is_session else [{"logprobs": [-0.5]}, {"logprobs": [-1]}]

    seen = Seen()

    chunks = [chunk.text for chunk in chat.stream("?", {"callbacks": [seen]}) if chunk.text]
    whole = chat.invoke("?")

    assert chunks == ["a", "b"]
    assert [found for found in seen.infos if found] == expected
    found = {name: whole.response_metadata[name] for name in expected[0]}
    assert found == {name: [value for each in expected for value in each[name]] for name in expected[0]}


class Seen(BaseCallbackHandler):
    """Keeps each chunk's generation_info."""

    def __init__(self) -> None:
        self.infos: list[Any] = []

    def on_llm_new_token(self, token: str, *, chunk: Any = None, **kwargs: Any) -> None:
        self.infos.append(chunk.generation_info)


def with_logprobs() -> Body:
    scores = [{"content": [{"token": text, "logprob": score}]} for text, score in (("a", -0.5), ("b", -1))]
    choices: list[Any] = [
        {"delta": {"content": text}, "logprobs": each} for text, each in zip("ab", scores, strict=True)
    ]
    choices.append({"delta": {}, "logprobs": {"content": []}, "finish_reason": "stop"})
    return Body([b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n" for choice in choices])


async def test_async_streams_give_the_same() -> None:
    """astream and ainvoke return the same as the synchronous methods."""
    chat, _ = model(openai_stream("a", "b"), openai_stream("a", "b"))

    assert [chunk.text async for chunk in chat.astream("?") if chunk.text] == ["a", "b"]
    assert (await chat.ainvoke("?")).text == "ab"


def test_settings_and_messages_become_one_body() -> None:
    """Images in LangChain's and OpenAI's form are accepted; a call's settings override the model's."""
    chat, runtime = model(
        openai_stream("a"), temperature=0.5, max_tokens=9, model_kwargs={"top_k": 3}, stop_sequences=["x"]
    )

    chat.invoke(
        [
            SystemMessage("short"),
            HumanMessage(
                [
                    {"type": "text", "text": "what?"},
                    {"type": "image", "base64": "AAAA", "mime_type": "image/png"},
                    {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
                ]
            ),
            AIMessage("a circle"),
            HumanMessage("sure?"),
        ],
        temperature=0.1,
    )

    [asked] = runtime.asked
    assert asked["EndpointName"] == "llava"
    body = asked["Body"]
    assert body["messages"] == [
        {"role": "system", "content": "short"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what?"},
                {"type": "image_url", "image_url": {"url": PNG}},
                {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
            ],
        },
        {"role": "assistant", "content": "a circle"},
        {"role": "user", "content": "sure?"},
    ]
    assert (body["temperature"], body["max_tokens"], body["top_k"], body["stop"]) == (0.1, 9, 3, ["x"])
    assert body["stream"]
    assert body["stream_options"] == {"include_usage": True}
    assert "seed" not in body


def test_stop_cuts_the_answer_of_a_server_that_does_not() -> None:
    """The text ends before a stop sequence that spans two tokens, and the stream is closed."""
    answer = openai_stream("a S", "TOP b", hangs=True)
    chat, runtime = model(answer)

    message = chat.invoke("?", stop=["STOP"])

    assert message.text == "a "
    assert message.response_metadata["finish_reason"] == "stop_sequence"
    assert answer.is_closed.is_set()
    assert runtime.asked[0]["Body"]["stop"] == ["STOP"]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"},
        {"type": "video", "base64": "AAAA", "mime_type": "video/mp4"},
        {"type": "file", "base64": "AAAA", "mime_type": "application/pdf", "filename": "a.pdf"},
    ],
)
def test_audio_video_and_files_are_refused(block: dict[str, str]) -> None:
    """Unsupported content is refused with a clear error before a request is sent."""
    chat, runtime = model()

    with pytest.raises(ValueError, match="not supported"):
        chat.invoke([HumanMessage([block])])

    assert runtime.asked == []


def test_refusals_are_told_in_the_models_words() -> None:
    """boto3's error becomes one with the handler's own message and code."""
    original = '{"error": {"code": "ContextTooLong", "message": "too long by 7 tokens"}}'
    chat, _ = model(refusal("ModelError", "Received client error (400) from primary", original))

    with pytest.raises(EndpointError, match=r"^too long by 7 tokens$") as caught:
        chat.invoke("?")

    assert caught.value.code == "ModelError"


def test_a_broken_answer_tells_what_had_come() -> None:
    """A broken stream raises an error with the text so far and is never taken for a whole answer."""
    chat, _ = model(openai_stream("a", "b", is_whole=False))

    with pytest.raises(StreamCut) as caught:
        chat.invoke("?")

    assert caught.value.received == "ab"


def test_unknown_settings_are_refused() -> None:
    for kind in (ChatSagemakerEndpoint, SagemakerAsyncEndpoint):
        with pytest.raises(ValidationError, match="max_tokes"):
            kind(endpoint_name="llava", max_tokes=1)


def test_secrets_are_not_shown() -> None:
    """Secrets appear neither in repr nor in traces."""
    chat, _ = model(aws_secret_access_key="hush")

    assert "hush" not in repr(chat) + str(chat.asdict())


async def test_a_cancelled_stream_is_ended_at_the_endpoint() -> None:
    """Cancelling a task that waits for a token closes the connection and leaves no thread."""
    answer = openai_stream("a", is_whole=False, hangs=True)
    chat, _ = model(answer)
    has_begun = asyncio.Event()

    async def read() -> None:
        async for _ in chat.astream("?"):
            has_begun.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(has_begun.wait(), 30)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(answer.is_closed.wait, 30)


async def test_leaving_an_async_stream_ends_it() -> None:
    """Leaving the loop over an async stream closes the connection."""
    answer = openai_stream("a", is_whole=False, hangs=True)
    chat, _ = model(answer)

    stream = chat.astream("?")
    assert (await anext(stream)).text == "a"
    await stream.aclose()

    assert await asyncio.to_thread(answer.is_closed.wait, 30)


async def test_long_answers_wait_for_their_reader() -> None:
    """All tokens arrive in order, although the reading thread may be only a few ahead."""
    texts = [f"{index} " for index in range(500)]
    chat, _ = model(openai_stream(*texts))

    assert [chunk.text async for chunk in chat.astream("?") if chunk.text] == texts


async def test_a_slow_reader_holds_the_thread_back() -> None:
    """The number of tokens read ahead is limited, however fast the endpoint is."""
    made = 0

    def endless() -> Iterator[int]:
        nonlocal made
        while True:
            made += 1
            yield made

    items = read_in_thread(endless, lambda: None)
    assert await anext(items) == 1
    while made <= MAX_AHEAD:  # noqa: ASYNC110  (it is a thread that counts)
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)

    assert made <= MAX_AHEAD + 2
    await items.aclose()


# Sessions


def test_a_session_is_opened_asked_and_closed(tmp_path: Path) -> None:
    """Images are sent once, then only each question, and the session is closed at the end."""
    picture = tmp_path / "a.png"
    picture.write_bytes(b"123")
    chat, runtime = model(
        {"NewSessionId": "ts-seq-1; Expires=2030-01-01T00:00:00Z"}, tgi_stream("re", "d"), tgi_stream("yes"), {}
    )

    with chat.open_session([picture, "http://x/y.png", b"12"], ttl_s=60) as conversation:
        first = conversation.invoke("color?", stop=["."], max_tokens=5)
        second = conversation.invoke([HumanMessage("color?"), first, HumanMessage("sure?")])

    opened, asked, again, closed = runtime.asked
    data = base64.b64encode(b"123").decode()
    images = [f"data:image/png;base64,{data}", "http://x/y.png", "data:application/octet-stream;base64,MTI="]
    assert (opened["SessionId"], opened["Body"]) == (
        "NEW_SESSION",
        {"requestType": "NEW_SESSION", "images": images, "ttl_s": 60},
    )
    assert {asked["SessionId"], again["SessionId"], closed["SessionId"]} == {"ts-seq-1"}
    assert asked["Body"]["prompt_text"] == "color?"
    assert asked["Body"]["parameters"] == {"max_new_tokens": 5, "stop": ["."]}
    assert again["Body"]["prompt_text"] == "sure?"
    assert closed["Body"] == {"requestType": "CLOSE"}
    assert (first.text, second.text) == ("red", "yes")
    assert second.usage_metadata == {"input_tokens": 5, "output_tokens": 1, "total_tokens": 6}


def test_a_session_refuses_another_conversation() -> None:
    """Earlier messages must match the session's history, or a suffix of it."""
    chat, runtime = session(tgi_stream("red"), tgi_stream("yes"), tgi_stream("no"))
    chat.invoke("color?")

    for before in ([HumanMessage("color?"), AIMessage("blue")], [HumanMessage("shape?"), AIMessage("red")]):
        with pytest.raises(SessionMismatch, match="not what was said"):
            chat.invoke([*before, HumanMessage("sure?")])
    chat.invoke([HumanMessage("color?"), AIMessage("red"), HumanMessage("sure?")])
    chat.invoke([AIMessage("yes"), HumanMessage("and now?")])

    assert len(runtime.asked) == 4


def test_an_answer_that_broke_off_was_not_said() -> None:
    """The session forgets a question whose answer broke off, so it can be asked again."""
    chat, _ = session(Body([b'data:{"token":{"text":"re"}}\n\n']), tgi_stream("red"))

    with pytest.raises(StreamCut):
        chat.invoke("color?")

    assert chat.invoke("color?").text == "red"
    with pytest.raises(SessionMismatch):
        chat.invoke([HumanMessage("color?"), AIMessage("re"), HumanMessage("sure?")])


@pytest.mark.parametrize("messages", [[SystemMessage("s"), HumanMessage("q")], [HumanMessage("q"), AIMessage("a")]])
def test_a_session_says_what_it_does_not_take(messages: list[Any]) -> None:
    """System messages and conversations without a question are refused with a reason."""
    chat, _ = session()

    with pytest.raises(ValueError, match=r"system message|no question"):
        chat.invoke(messages)


def test_a_session_that_is_over_does_not_hide_an_error() -> None:
    """Closing an expired session is silent, so that an error inside the block is raised."""
    chat, _ = session(refusal("ValidationError", "the session has expired"))

    with pytest.raises(ZeroDivisionError), chat:
        raise ZeroDivisionError
