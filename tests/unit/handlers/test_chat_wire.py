"""Parsing requests into commands: every body form, and each error."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handlers.chat.commands import AddImages, Ask, CloseSession, OpenSession, ReportStatus
from handlers.chat.dialects.session import SessionForm
from handlers.chat.dialects.tgi_lmi import LmiForm, TgiForm
from handlers.chat.forms import AnswerForm
from handlers.chat.parameters import MAX_STOP, MAX_STOP_CHARS, Parameters, parse_parameters
from handlers.engine.contract import SamplingParams
from handlers.errors import (
    HandlerError,
    InvalidJson,
    InvalidRequest,
    SessionIdMismatch,
    SessionLimitReached,
    UnsupportedMedia,
)
from handlers.requests.incoming import Caller
from tests.unit.handlers.conftest import make_incoming, parse

NOBODY = Caller("", "")
SESSION = "x-amzn-sagemaker-session-id"
URL = "https://example.com/a.png"


def command(body: Any, **headers: str) -> Any:
    return parse(make_incoming({name.replace("_", "-"): value for name, value in headers.items()}, body))


def ask(**fields: Any) -> Any:
    return command({"type": "send_text_prompt", "session_id": "s", "prompt_text": "hi", **fields})


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_body_is_json(kind: type[bytes | bytearray]) -> None:
    """The worker reads a long body into a bytearray."""
    body = {"type": "close_session", "session_id": "s"}

    assert command(kind(json.dumps(body).encode())) == CloseSession(caller=NOBODY, session_id="s")


def test_sample_opens_with_a_path() -> None:
    """The AWS sample's start_session needs no header."""
    opened = command({"type": "start_session", "path": URL})

    assert opened == OpenSession(caller=NOBODY, images=(URL,), ttl_s=None, invocation_id="")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"type": "start_session"}, '{"requestType": "NEW_SESSION"} opens a session without one'),
        ({"input": "a", "model": "m"}, "this model generates text, and 'input' is for a model of embeddings"),
        ({"query": "a", "documents": ["b"]}, "'documents' is for a model of embeddings or rerank"),
        ({"type": "send", "input": "a"}, "'type' must be one of start_session"),
        ({"model": "m"}, "the body needs 'messages', 'prompt' or 'inputs', or, for a session, a 'type': start_session"),
    ],
)
def test_a_body_for_another_model_is_told_what_to_send(body: Any, words: str) -> None:
    """The error for a body of another kind of model says what to send instead."""
    with pytest.raises(InvalidRequest) as caught:
        command(body)
    assert words in str(caught.value)


def test_open_with_header() -> None:
    """The runtime API's NEW_SESSION header is accepted with the sample's body."""
    opened = parse(make_incoming({SESSION: "NEW_SESSION"}, {"type": "start_session", "path": URL, "ttl_s": 60}))

    assert opened == OpenSession(caller=NOBODY, images=(URL,), ttl_s=60, invocation_id="")


def test_open_with_several_images() -> None:
    """'path', 'image' and 'images' are combined in this order."""
    opened = command({"type": "start_session", "images": ["c", "d"], "image": "b", "path": "a"})

    assert opened.images == ("a", "b", "c", "d")


def test_guide_opens_without_an_image() -> None:
    """AWS's guide opens a session with only a requestType."""
    assert command({"requestType": "NEW_SESSION"}) == OpenSession(
        caller=NOBODY, images=(), ttl_s=None, invocation_id=""
    )
    assert command({"requestType": "NEW_SESSION", "image": URL}).images == (URL,)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, {"type": "start_session", "path": URL}),
        ({SESSION: "NEW_SESSION"}, {"requestType": "NEW_SESSION"}),
        ({SESSION: "NEW_SESSION"}, b"\xff\xd8\xff"),
        ({"content-type": "image/png"}, b"picture"),
    ],
)
def test_openings_are_refused_if_the_caller_has_all_its_sessions(headers: dict[str, str], body: Any) -> None:
    """An opening is refused if the proxy's header says that the caller's share is used up.

    Other requests are not affected.
    """
    limit = {"x-torchmoor-session-limit": "reached"}
    assert isinstance(parse(make_incoming(headers, body)), OpenSession)

    with pytest.raises(SessionLimitReached) as caught:
        parse(make_incoming(headers | limit, body))

    assert (caught.value.status, caught.value.headers()["Retry-After"]) == (429, "1")
    assert isinstance(parse(make_incoming(limit, {"type": "close_session", "session_id": "s"})), CloseSession)


@pytest.mark.parametrize("content_type", ["image/png", "IMAGE/JPEG; q=1", "application/octet-stream", ""])
def test_raw_image_opens_or_adds(content_type: str) -> None:
    """Image bytes open a session under NEW_SESSION and are added to the session that the header names."""
    headers = {"content-type": content_type}

    opened = parse(make_incoming({**headers, SESSION: "NEW_SESSION"}, b"\x89PNG"))
    added = parse(make_incoming({**headers, SESSION: "s"}, b"\x89PNG"))

    assert opened == OpenSession(caller=NOBODY, images=(b"\x89PNG",), ttl_s=None, invocation_id="")
    assert added == AddImages(caller=NOBODY, session_id="s", images=(b"\x89PNG",), invocation_id="")


def test_image_that_says_so_opens_a_session_by_itself() -> None:
    """Without a session header, as in asynchronous requests, an image opens a session; untyped bytes are refused."""
    opened = parse(make_incoming({"content-type": "image/png"}, b"\x89PNG"))

    assert opened == OpenSession(caller=NOBODY, images=(b"\x89PNG",), ttl_s=None, invocation_id="")
    with pytest.raises(InvalidRequest, match="session id"):
        parse(make_incoming({"content-type": "application/octet-stream"}, b"\x89PNG"))


def test_json_without_a_content_type_is_json() -> None:
    """A body that begins with a brace is parsed as JSON, whatever its content type."""
    body = b'  {"type": "close_session", "session_id": "s"}'

    assert isinstance(command(body), CloseSession)
    assert isinstance(command(body, content_type="application/octet-stream"), CloseSession)


def test_ask_with_everything() -> None:
    """The command contains all fields of a question."""
    asked = parse(
        make_incoming(
            {SESSION: "s", "x-torchmoor-endpoint": "llava", "x-torchmoor-principal": "p"},
            {
                "type": "send_text_prompt",
                "prompt_text": "what?",
                "images": [URL],
                "stream": True,
                "parameters": {"max_new_tokens": 5},
            },
        )
    )

    assert asked == Ask(
        caller=Caller("llava", "p"),
        session_id="s",
        prompt_text="what?",
        images=(URL,),
        parameters=Parameters(max_new_tokens=5),
        invocation_id="",
        form=SessionForm(),
        is_streaming=True,
    )


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", SessionForm()),
        ("*/*", SessionForm()),
        ("text/event-stream", TgiForm()),
        ("application/json, TEXT/event-stream;q=0.5", TgiForm()),
        ("application/jsonlines", LmiForm()),
    ],
)
def test_accept_chooses_the_stream_form(accept: str, form: AnswerForm) -> None:
    """Without a known Accept the stream is plain text."""
    body = {"type": "send_text_prompt", "session_id": "s", "prompt_text": "x", "stream": True}

    asked = command(body, accept=accept)

    assert asked.is_streaming
    assert asked.form == form


def test_accept_alone_does_not_stream() -> None:
    """Only the body's stream field selects a stream; a whole answer of the session API has one form."""
    body = {"type": "send_text_prompt", "session_id": "s", "prompt_text": "x"}

    asked = command(body, accept="text/event-stream")

    assert not asked.is_streaming
    assert asked.form == SessionForm()


def test_add_and_close() -> None:
    """Both operations are parsed, including the guide's word for close."""
    assert command({"type": "add_images", "session_id": "s", "image": "a"}).images == ("a",)
    assert command({"type": "close_session", "session_id": "s"}).session_id == "s"
    assert parse(make_incoming({SESSION: "s"}, {"requestType": "CLOSE"})) == CloseSession(caller=NOBODY, session_id="s")


def test_status_needs_no_body() -> None:
    """The status operation needs only a header."""
    assert command(None, x_torchmoor_operation="status") == ReportStatus()


@pytest.mark.parametrize(
    "body",
    [
        None,
        b"",
        "",
        [],
        5,
        0,
        True,
        3.5,
        {},
        {"type": None},
        {"type": 5},
        {"type": ["start_session"]},
        {"type": "START_SESSION"},
        {"requestType": "close"},
        {"requestType": {}},
        {"type": "start_session"},
        {"type": "start_session", "path": ""},
        {"type": "start_session", "path": 5},
        {"type": "start_session", "images": URL},
        {"type": "start_session", "images": [None]},
        {"type": "start_session", "images": []},
        {"type": "start_session", "path": URL, "ttl_s": 0},
        {"type": "start_session", "path": URL, "ttl_s": True},
        {"type": "start_session", "path": URL, "ttl_s": 1.5},
        {"type": "start_session", "path": URL, "session_id": "s"},
        {"type": "start_session", "path": URL, "prompt_text": "x"},
        {"type": "add_images", "session_id": "s"},
        {"type": "close_session"},
        {"type": "close_session", "session_id": ""},
        {"type": "close_session", "session_id": 7},
        {"type": "close_session", "session_id": "s", "path": URL},
        {"type": "send_text_prompt", "session_id": "s"},
        {"type": "send_text_prompt", "session_id": "s", "prompt_text": ""},
        {"type": "send_text_prompt", "session_id": "s", "prompt_text": " \n"},
        {"type": "send_text_prompt", "session_id": "s", "prompt_text": ["x"]},
        {"type": "send_text_prompt", "session_id": "s", "prompt_text": "half \ud83d"},
        {"type": "send_text_prompt", "session_id": "s", "prompt_text": "x", "stream": "true"},
        {"type": "send_text_prompt", "session_id": "s", "prompt_text": "x", "parameters": []},
        {"type": "send_text_prompt", "session_id": "s", "prompt_text": "x", "temperature": 1},
        {"type": "send_text_prompt", "prompt_text": "x"},
    ],
)
def test_wrong_bodies_are_invalid_requests(body: Any) -> None:
    """Each wrong body is a 400 that says what is wrong."""
    with pytest.raises(InvalidRequest) as caught:
        command(body)

    assert caught.value.status == 400
    assert caught.value.message


@pytest.mark.parametrize(
    "body", [b"{", b"{\xff", b"nonsense", b"\xef\xbb\xbf", b"[" * 100_000, b"{" + b'"a":[' * 100_000]
)
def test_what_is_no_json_is_invalid_json(body: Any) -> None:
    """Malformed JSON has its own code, and the error does not repeat the text."""
    with pytest.raises(InvalidJson) as caught:
        command(body, content_type="application/json")

    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("content_type", "is_named"), [("text/csv; charset=utf-8", True), ("application/json", False), ("", False)]
)
def test_body_of_another_type_is_named(content_type: str, is_named: bool) -> None:
    """The error for a body that is not JSON names a Content-Type that promises something else."""
    with pytest.raises(InvalidJson) as caught:
        parse(make_incoming({"content-type": content_type}, b"[1,2"))

    assert ("Content-Type is 'text/csv'" in str(caught.value)) == is_named


@pytest.mark.parametrize(
    ("body", "is_misplaced"),
    [
        ({"type": "send_text_prompt", "session_id": "s", "prompt_text": "hi", "max_new_tokens": 5}, True),
        ({"inputs": "hi", "temperature": 0.5, "stop_sequences": ["."]}, True),
        ({"inputs": "hi", "temprature": 0.5}, False),
        ({"type": "close_session", "session_id": "s", "temperature": 0.5}, False),
    ],
)
def test_misplaced_parameters_are_explained(body: Any, is_misplaced: bool) -> None:
    """A parameter beside `parameters` gets an error that says where it belongs, if the body has such a place."""
    with pytest.raises(InvalidRequest, match="has no field") as caught:
        command(body)

    assert ("in 'parameters'" in str(caught.value)) == is_misplaced
    assert ("must be left out" in str(caught.value)) != is_misplaced


def test_an_unknown_parameter_is_named_with_what_to_do() -> None:
    """TGI ignores it; here a client leaves it out, since an answer without its effect would be wrong."""
    with pytest.raises(InvalidRequest, match="no field 'max_length', 'tempreature'; unknown fields must be left out"):
        ask(parameters={"max_length": 5, "tempreature": 0.5})


def test_headers_and_body_must_agree() -> None:
    """Different session ids in header and body are an error; equal ones are accepted."""
    body = {"type": "close_session", "session_id": "a"}

    with pytest.raises(SessionIdMismatch):
        parse(make_incoming({SESSION: "b"}, body))

    assert parse(make_incoming({SESSION: "a"}, body)).session_id == "a"


def test_new_session_header_needs_an_opening_body() -> None:
    """NEW_SESSION with a question or a close is refused."""
    for kind in ("close_session", "send_text_prompt", "add_images"):
        with pytest.raises(InvalidRequest, match="NEW_SESSION"):
            parse(
                make_incoming(
                    {SESSION: "NEW_SESSION"}, {"type": kind, "prompt_text": "x"} if "text" in kind else {"type": kind}
                )
            )


def test_open_under_an_existing_session_is_refused() -> None:
    """A start_session with another session's id in the header is a client error."""
    with pytest.raises(InvalidRequest):
        parse(make_incoming({SESSION: "s"}, {"type": "start_session", "path": URL}))


def test_unknown_operation_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="reboot"):
        command(None, x_torchmoor_operation="reboot")


@pytest.mark.parametrize(
    "body",
    [
        {"type": "close_session", "\u00e9" * 3_000_000: 1},
        {"type": "close_session", **{f"field-{i}": 1 for i in range(10_000)}},
        {"type": "send_text_prompt", "session_id": "s", "prompt_text": "x", "parameters": {"x" * 3_000_000: 1}},
    ],
)
def test_errors_stay_small_whatever_the_client_sent(body: Any) -> None:
    """An error larger than TorchServe's max_response_size would kill the worker."""
    with pytest.raises(InvalidRequest) as caught:
        command(body)

    assert len(caught.value.body()) < 2000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ["type", "requestType", "session_id", "path", "image", "images", "ttl_s", "prompt_text", "parameters", "stream"]
)
VALUES = st.sampled_from(
    ["start_session", "add_images", "send_text_prompt", "close_session", "NEW_SESSION", "CLOSE", "s", True]
)
PARAMETERS = st.dictionaries(
    st.sampled_from([*Parameters.__dataclass_fields__, "watermark"]) | st.text(), JSON | st.floats(), max_size=4
)
HEADERS = st.dictionaries(
    st.sampled_from([SESSION, "content-type", "accept", "x-torchmoor-operation", "x-torchmoor-endpoint"]),
    st.sampled_from(["NEW_SESSION", "s", "application/json", "image/png", "status", "text/event-stream"]) | st.text(),
)


@settings(max_examples=300, deadline=None)
@given(
    body=JSON | st.dictionaries(FIELDS, VALUES | JSON | PARAMETERS, max_size=6) | st.binary() | st.text(),
    headers=HEADERS,
)
def test_anything_is_a_command_or_a_handler_error(body: Any, headers: dict[str, str]) -> None:
    """Every request gives a command or a client error that fits into a response."""
    refused: HandlerError | None = None
    try:
        parse(make_incoming(headers, body))
    except HandlerError as error:
        refused = error

    if refused is not None:
        assert 400 <= refused.status < 500
        assert json.loads(refused.body())["error"]["code"] == refused.code


@settings(max_examples=300, deadline=None)
@given(given=PARAMETERS)
def test_accepted_parameters_are_within_their_ranges(given: dict[str, Any]) -> None:
    """Accepted parameters have the right type and range, so the engine need not check again."""
    try:
        p = parse_parameters(given)
    except InvalidRequest:
        return
    assert p.temperature is None or (isinstance(p.temperature, float) and 0 <= p.temperature < 1e9)
    assert p.repetition_penalty is None or isinstance(p.repetition_penalty, float)
    assert p.top_p is None or 0 < p.top_p <= 1
    assert p.max_new_tokens is None or p.max_new_tokens >= 1


def test_all_parameters_are_taken() -> None:
    """TGI's parameters keep their meaning; whole numbers become the floats that the samplers require."""
    given = {
        "do_sample": True,
        "temperature": 2,
        "top_k": 3,
        "top_p": 1,
        "min_p": 0,
        "typical_p": 0.5,
        "repetition_penalty": 2,
        "seed": 2**63 - 1,
        "max_new_tokens": 7,
        "min_tokens": 0,
        "ignore_eos": True,
        "truncate": 9,
        "stop": ["a", "b"],
        "return_full_text": True,
        "details": True,
        "watermark": False,
    }

    p = parse_parameters(given)

    assert p == Parameters(**{**{k: v for k, v in given.items() if k != "watermark"}, "stop": ("a", "b")})
    assert isinstance(p.temperature, float)
    assert isinstance(p.repetition_penalty, float)


def test_lengths_have_the_names_of_other_servers() -> None:
    """TGI's clients and transformers have their own names; a parameter under two names is refused."""
    own = parse_parameters({"ignore_eos": True, "min_tokens": 3})

    assert parse_parameters({"ignore_eos_token": True, "min_new_tokens": 3}) == own
    with pytest.raises(InvalidRequest, match=r"parameters\.min_tokens is set under two names"):
        parse_parameters({"min_new_tokens": 3, "min_tokens": 3})


def test_a_grammar_decides_where_its_answer_ends() -> None:
    free = Parameters(ignore_eos=True, min_tokens=3)

    assert free.sampling(9) == SamplingParams(max_new_tokens=9, ignore_eos=True, min_tokens=3)
    assert free.sampling(9, "compiled") == SamplingParams(max_new_tokens=9, grammar="compiled")


def test_null_parameters_are_left_to_us() -> None:
    """null means not given, as in TGI's clients."""
    assert parse_parameters(None) == parse_parameters({}) == parse_parameters({"top_k": None, "stop": None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_sample", 1),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("typical_p", 0),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-9),
        ("repetition_penalty", 1e8),
        ("seed", -1),
        ("seed", 2**63),
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 1.0),
        ("min_new_tokens", -1),
        ("ignore_eos", 1),
        ("ignore_eos_token", "true"),
        ("truncate", 0),
        ("stop", "x"),
        ("stop", [""]),
        ("stop", ["x"] * (MAX_STOP + 1)),
        ("stop", ["x" * (MAX_STOP_CHARS + 1)]),
        ("stop", [1]),
        ("return_full_text", "no"),
        ("details", 0),
        ("watermark", True),
        ("best_of", 2),
    ],
)
def test_wrong_parameters_are_named(name: str, value: Any) -> None:
    """Each wrong parameter is a 400 that names it."""
    with pytest.raises(InvalidRequest, match=name):
        ask(parameters={name: value})


@pytest.mark.parametrize(
    ("given", "is_sampling"),
    [
        ({}, False),
        ({"do_sample": True}, True),
        ({"temperature": 0.7}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({"typical_p": 0.5}, True),
        ({"do_sample": False, "temperature": 0.7}, False),
        ({"temperature": 0, "do_sample": True}, False),
        ({"temperature": 0.0, "top_p": 0.5}, False),
        ({"repetition_penalty": 1.2, "seed": 1}, False),
        ({"min_tokens": 3, "ignore_eos": True}, False),
    ],
)
def test_sampling_is_on_when_asked_for(given: dict[str, Any], is_sampling: bool) -> None:
    """A sampling setting enables sampling; temperature 0 and do_sample false disable it."""
    assert parse_parameters(given).is_sampling is is_sampling


@pytest.mark.parametrize("content_type", ["video/mp4", "Audio/WAV; q=1"])
def test_videos_and_sounds_are_refused_as_such(content_type: str) -> None:
    """The Content-Type decides, whatever the body is, and the message contains a searchable phrase."""
    with pytest.raises(UnsupportedMedia, match=r"(video|audio) is not supported"):
        parse(make_incoming({"content-type": content_type, SESSION: "NEW_SESSION"}, b"\x00\x01"))
