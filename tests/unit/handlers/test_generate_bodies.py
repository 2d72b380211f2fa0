"""Requests without a session: TGI's and LMI's `inputs`, OpenAI's `messages`."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handlers.chat.commands import Ask, Generate, OpenAndAsk
from handlers.chat.dialects.chat_completions import ChatCompletionForm
from handlers.chat.dialects.table import parse
from handlers.chat.dialects.tgi_lmi import LmiForm, LmiJsonForm, TgiForm
from handlers.chat.forms import AnswerForm
from handlers.chat.messages import ImagePart, Message, TextPart, images_of, split_images
from handlers.chat.parameters import Parameters
from handlers.errors import BadInput, ContextTooLong, HandlerError, InvalidRequest
from handlers.requests.incoming import Caller
from handlers.settings.request import RequestSettings
from tests.unit.handlers.conftest import make_incoming

URL = "https://example.com/a.png"
DATA = "data:image/png;base64,aGk="
SEE = {"type": "image_url", "image_url": {"url": URL}}
NOW = 1_800_000_000.0


def command(body: Any, headers: dict[str, str] | None = None, **limits: Any) -> Any:
    incoming = replace(make_incoming(headers or {}, body), received_at=NOW)
    return parse(incoming, RequestSettings(**limits))


def chat(**fields: Any) -> Any:
    return command({"messages": [{"role": "user", "content": "hi"}], **fields})


# inputs


def test_inputs_are_taken_as_they_are() -> None:
    """A raw prompt is not stripped, and its parameters are TGI's."""
    prompt = "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello [/INST] "

    found = command(
        {"inputs": prompt, "parameters": {"max_new_tokens": 5, "stop": ["x"]}, "stream": True},
        {"x-torchmoor-endpoint": "llm", "amz-sdk-invocation-id": "i"},
    )

    assert found == Generate(
        caller=Caller("llm", ""),
        prompt=prompt,
        messages=(),
        parameters=Parameters(max_new_tokens=5, stop=("x",)),
        invocation_id="i",
        form=TgiForm(),
        is_streaming=True,
    )


@pytest.mark.parametrize(
    ("accept", "setting", "form"),
    [
        ("", "tgi", TgiForm()),
        ("application/json", "tgi", TgiForm()),
        ("application/jsonlines", "tgi", LmiForm()),
        ("text/event-stream", "lmi", TgiForm()),
        ("*/*", "lmi", LmiForm()),
        ("", "lmi-outputs", LmiForm(are_outputs=True)),
        ("application/jsonlines", "lmi-outputs", LmiForm(are_outputs=True)),
        ("", "lmi-json", LmiJsonForm()),
        ("application/json", "lmi-json", LmiJsonForm()),
        ("application/jsonlines", "lmi-json", LmiForm()),
    ],
)
@pytest.mark.parametrize("is_streaming", [True, False])
def test_form_of_inputs_is_by_accept_then_by_setting(
    accept: str, setting: str, form: AnswerForm, is_streaming: bool
) -> None:
    """Published clients send no Accept, so a setting selects the form."""
    found = command({"inputs": "x", "stream": is_streaming}, {"accept": accept}, inputs_form=setting)

    assert (found.form, found.is_streaming) == (form, is_streaming)


@pytest.mark.parametrize(("setting", "is_streaming"), [("lmi-json", True), ("lmi", False), ("tgi", False)])
def test_only_lmi_json_streams_without_being_asked(setting: str, is_streaming: bool) -> None:
    """LMI 0.25's clients send no `stream` and print what arrives."""
    assert command({"inputs": "x"}, inputs_form=setting).is_streaming is is_streaming


@pytest.mark.parametrize(("route", "is_streaming"), [("generate", False), ("generate_stream", True)])
@pytest.mark.parametrize("accept", ["", "application/jsonlines"])
@pytest.mark.parametrize("setting", ["tgi", "lmi", "lmi-json"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": False}])
def test_tgis_route_sets_the_form(
    route: str, is_streaming: bool, accept: str, setting: str, fields: dict[str, bool]
) -> None:
    """Its clients rely on the route, whatever they accept and the endpoint's setting is."""
    found = command({"inputs": "x", **fields}, {"accept": accept, "x-torchmoor-tgi-route": route}, inputs_form=setting)

    assert (found.form, found.is_streaming) == (TgiForm(is_list=False), is_streaming)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, ""),
        ({"prompt": "hi"}, ""),
        ({"type": "start_session"}, ""),
        ({}, ""),
        (b"\x89PNG", "image/png"),
    ],
)
def test_tgis_routes_take_inputs_only(body: Any, content_type: str) -> None:
    """Other bodies open no session and are not answered in another form."""
    with pytest.raises(BadInput):
        command(body, {"content-type": content_type, "x-torchmoor-tgi-route": "generate"})


def test_tgis_route_takes_turns() -> None:
    """The session header makes the request a turn, as on other paths."""
    found = command({"inputs": "x"}, {"x-amzn-sagemaker-session-id": "s", "x-torchmoor-tgi-route": "generate_stream"})

    assert isinstance(found, Ask)
    assert (found.session_id, found.form, found.is_streaming) == ("s", TgiForm(is_list=False), True)


def test_full_text_and_details_are_the_forms_business() -> None:
    """An answer repeats the prompt, and has details, where its dialect requires that."""
    found = command({"inputs": "Q", "parameters": {"return_full_text": True, "details": True}})

    assert found.form == TgiForm(text_before="Q", has_details=True)


def test_parameters_that_ask_for_nothing_pass() -> None:
    """Parameters with neutral values are accepted, because huggingface_hub sends all that it knows."""
    quiet = {
        "best_of": 1,
        "decoder_input_details": False,
        "watermark": False,
        "sagemaker_base_url": "x",
        "grammar": None,
        "top_n_tokens": None,
    }

    assert command({"inputs": "x", "parameters": quiet}).parameters == Parameters()
    assert command({"inputs": "x", "parameters": {"stop_sequences": ["a"]}}).parameters.stop == ("a",)


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": ""},
        {"inputs": ["a", "b"]},
        {"inputs": "\ud800"},
        {"inputs": "x", "stream": "yes"},
        {"inputs": "x", "stream": 0},
        {"inputs": "x", "prompt": "y"},
        {"inputs": "x", "parameters": []},
        {"inputs": "x", "parameters": {"best_of": 2}},
        {"inputs": "x", "parameters": {"grammar": {"type": "json"}}},
        {"inputs": "x", "parameters": {"stop": ["a"], "stop_sequences": ["b"]}},
        {"inputs": "x", "session_id": "s"},
    ],
)
def test_wrong_inputs_are_invalid(body: Any) -> None:
    """Every wrong input gives one clear error."""
    with pytest.raises(InvalidRequest):
        command(body)


@pytest.mark.parametrize(
    "body",
    [{"inputs": f"![]({URL})x"}, {"messages": [{"role": "user", "content": [SEE, {"type": "text", "text": "x"}]}]}],
)
def test_a_session_header_makes_a_turn(body: Any) -> None:
    """With a session header, `inputs` becomes a turn with the body's images and form of answer.

    NEW_SESSION opens a session.
    """
    turn = command(body, {"x-amzn-sagemaker-session-id": "ts-seq-x"})
    opening = command(body, {"x-amzn-sagemaker-session-id": "NEW_SESSION"})

    assert isinstance(turn, Ask)
    assert (turn.session_id, turn.prompt_text, turn.images, turn.history) == ("ts-seq-x", "x", (URL,), ())
    assert type(turn.form) is type(command(body).form)
    assert isinstance(opening, OpenAndAsk)
    assert opening.ask.prompt_text == "x"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"inputs": f"![]({URL})"}, "needs a question"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "last message"),
    ],
)
def test_a_turn_without_a_question_is_refused(body: Any, problem: str) -> None:
    """The error says what is missing."""
    with pytest.raises(InvalidRequest, match=problem):
        command(body, {"x-amzn-sagemaker-session-id": "ts-seq-x"})


def test_markdown_images_are_found_in_order() -> None:
    """TGI's `![](...)` with an address is an image; other text stays text."""
    parts = split_images(f"![]({URL})What, ![]({DATA}) and ![](x.png) ![a]({URL})")

    assert parts == (
        ImagePart(URL),
        TextPart("What, "),
        ImagePart(DATA),
        TextPart(f" and ![](x.png) ![a]({URL})"),
    )
    assert images_of(parts) == (URL, DATA)
    assert split_images("") == (TextPart(""),)


@given(st.lists(st.sampled_from([f"![]({URL})", f"![]({DATA})", "![](", ")", "text", "\n", "(", "!"]), max_size=12))
def test_splitting_loses_nothing(pieces: list[str]) -> None:
    """Text and images joined again are the prompt."""
    prompt = "".join(pieces)

    parts = split_images(prompt)

    assert "".join(p.text if isinstance(p, TextPart) else f"![]({p.reference})" for p in parts) == prompt


# messages


def test_messages_with_images() -> None:
    """Content may be text or parts, in order; templates get the texts and the places of images."""
    found = command(
        {
            "model": "llava",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {
                    "role": "user",
                    "name": "me",
                    "content": [
                        {"type": "text", "text": "What is"},
                        {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
                        {"type": "text", "text": "this?"},
                        {"type": "image_url", "image_url": {"url": DATA}},
                    ],
                },
                {"role": "assistant", "content": "A dog.", "refusal": None, "tool_calls": None},
                {"role": "developer", "content": [{"type": "text", "text": "x"}]},
            ],
        },
        {"x-torchmoor-request-id": "r-1"},
    )

    assert found.prompt is None
    assert found.form == ChatCompletionForm(id="chatcmpl-r-1", created=int(NOW), model="llava")
    assert [m.role for m in found.messages] == ["system", "user", "assistant", "system"]
    question = found.messages[1]
    assert images_of(question.parts) == (URL, DATA)
    assert question.for_template() == {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is"},
            {"type": "image"},
            {"type": "text", "text": "this?"},
            {"type": "image"},
        ],
    }
    assert found.messages[0] == Message("system", (TextPart("Be brief."),))


def test_openai_parameters_are_mapped() -> None:
    """max_tokens and max_completion_tokens may have the same value; stop may be one text."""
    found = chat(
        max_tokens=4, max_completion_tokens=4, temperature=1, top_p=0.5, seed=7, stop="END", n=1, user="u",
        presence_penalty=0, frequency_penalty=0.0, stream=True, stream_options={"include_usage": True}, logprobs=True,
        response_format={"type": "text"}, tools=[], tool_choice=None, metadata={"a": "b"},
        prediction={"type": "content", "content": "x"}, top_k=3, min_p=0.05,
        verbosity="medium", prompt_cache_retention="24h", prompt_cache_options={"mode": "implicit"},
        sagemaker_base_url="http://127.0.0.1", min_tokens=2, ignore_eos=True,
    )  # fmt: skip

    assert found.parameters == Parameters(
        max_new_tokens=4,
        length_field="max_completion_tokens",
        temperature=1.0,
        top_p=0.5,
        top_k=3,
        min_p=0.05,
        min_tokens=2,
        ignore_eos=True,
        seed=7,
        stop=("END",),
        frequency_penalty=0.0,
        presence_penalty=0.0,
    )
    assert found.is_streaming
    assert (found.form.has_usage, found.form.has_logprobs) == (True, True)


def test_two_lengths_that_differ_are_refused() -> None:
    with pytest.raises(
        InvalidRequest, match="'max_tokens' and 'max_completion_tokens' have different values"
    ) as caught:
        chat(max_tokens=3, max_completion_tokens=4)

    assert caught.value.param == "max_completion_tokens"


def test_openais_whole_range_of_numbers_is_read() -> None:
    """OpenAI's top_p begins at 0, which leaves the likeliest token, and its seeds may be negative."""
    least = chat(top_p=0, temperature=2, seed=-(2**63)).parameters
    found = [chat(seed=seed).parameters.seed for seed in (-1, -2, 0)]

    assert 0 < least.top_p < 1e-6
    assert least.seed == 0
    assert len(set(found)) == 3
    assert min(found) == 0


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no", "annotations": [{"type": "url_citation"}], "parsed": {"a": 1}},
        {"content": None, "refusal": "no"},
        {"refusal": "no"},
        {"content": "", "refusal": "no"},
        {"content": [{"type": "refusal", "refusal": "no"}]},
    ],
)
def test_an_answer_may_be_sent_again_as_a_client_has_it(message: dict[str, Any]) -> None:
    """OpenAI's `parse` adds a field to the message; a refusal is read as text."""
    asked = {"role": "user", "content": "x"}

    found = command({"messages": [asked, {"role": "assistant", **message}, asked]})

    assert [part.text for part in found.messages[1].parts] == ["no"]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "so"},
        {"reasoning": "so"},  # of vLLM and huggingface_hub
        {"reasoning_content": "so", "reasoning": "so"},
        {"reasoning_content": None, "reasoning": "so"},
    ],
)
def test_reasoning_is_sent_again_under_either_name(fields: dict[str, Any]) -> None:
    asked = {"role": "user", "content": "x"}

    found = command({"messages": [asked, {"role": "assistant", "content": "no", **fields}, asked]})

    assert [message.reasoning for message in found.messages] == ["", "so", ""]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "reasoning": "so"}, "messages[0]"),
        ({"role": "assistant", "content": "x", "reasoning": 1}, "messages[0].reasoning"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "x", "refusal": "no"}, "messages[0]"),
        ({"role": "assistant", "refusal": 1}, "messages[0].refusal"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].refusal"),
    ],
)
def test_a_refusal_is_a_text_of_an_assistant(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        command({"messages": [message]})

    assert refused.value.param == param


def test_answers_have_ids_and_a_model_of_their_own() -> None:
    """Without a proxy each answer gets an id; without a model name it has the endpoint's."""
    first, second = chat(), chat()
    named = command({"messages": [{"role": "user", "content": "x"}]}, {"x-torchmoor-endpoint": "llava"})

    assert first.form.id != second.form.id
    assert first.form.id.startswith("chatcmpl-")
    assert (first.form.model, named.form.model) == ("default", "llava")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", {"type": "function"}),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "xml"}),
        ("n", 9),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("logit_bias", {"1": 200}),
        ("logit_bias", {"-1": 2}),
        ("logit_bias", {"one": 2}),
        ("logit_bias", {"1": True}),
        ("logit_bias", [1]),
        ("top_logprobs", 2),
        ("top_logprobs", 21),
        ("logprobs", 1),
        ("stream", "true"),
        ("stream_options", {"include_usage": True}),
        ("temperature", -1),
        ("top_p", -0.1),
        ("seed", -(2**63) - 1),
        ("prediction", {"type": "image"}),
        ("max_tokens", 0),
        ("seed", "x"),
        ("stop", ["a"] * 17),
        ("stop", 5),
        ("model", 5),
        ("model", "x" * 300),
        ("store", True),
        ("modalities", ["audio"]),
        ("reasoning_effort", "endless"),
        ("verbosity", "high"),
        ("audio", {}),
    ],
)
def test_what_is_not_offered_is_named(field: str, value: Any) -> None:
    """An unsupported field is a 400 that names it in message and param, never silently ignored."""
    with pytest.raises(InvalidRequest, match=field) as caught:
        chat(**{field: value})

    assert caught.value.param == field


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        (["hi"], r"messages\[0\]"),
        ([{"role": "tool", "content": "x"}], r"messages\[0\].tool_call_id"),
        ([{"role": "function", "content": "x"}], r"messages\[0\].role"),
        ([{"content": "x"}], "role"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": []}], "content"),
        ([{"role": "user", "content": "\udfff"}], "Unicode"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]"),
        ([{"role": "user", "content": [{"type": "sound"}]}], r"content\[0\].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}], "image_url.url"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url.url"),
        (
            [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": URL}}]}],
            "messages of a user or a tool",
        ),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "tool_calls"),
    ],
)
def test_wrong_messages_are_named(messages: Any, where: str) -> None:
    """The error names the location of the mistake."""
    with pytest.raises(InvalidRequest, match=where):
        command({"messages": messages})


def test_number_of_messages_is_limited() -> None:
    with pytest.raises(ContextTooLong, match="3 messages, more than 2"):
        command({"messages": [{"role": "user", "content": "x"}] * 3}, max_messages=2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["role", "content", "type", "text", "image_url", "url", "name"]
NEAR = st.recursive(
    st.sampled_from(["user", "text", "image_url", URL, "hi"]) | JSON,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(["stream", "stop", "n", "tools", "model", "stream_options", "parameters", "temperature", "x"])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["messages", "inputs"]), NEAR, st.dictionaries(FIELDS, JSON, max_size=3))
def test_anything_is_a_command_or_a_handler_error(kind: str, value: Any, rest: dict[str, Any]) -> None:
    """The parser handles every body, and no error repeats much of it."""
    try:
        found = command({kind: value, **rest})
    except HandlerError as error:
        found = error

    if isinstance(found, HandlerError):
        assert found.status == 400
        assert len(found.body()) < 2000
    else:
        assert isinstance(found, Generate)
        assert (found.prompt is None) != (found.messages == ())
