"""An answer that one worker begins and another one continues equals the answer of a single worker, in every form."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from handlers.engine.builtin import chat_engine
from handlers.engine.contract import Capabilities
from handlers.errors import InvalidRequest
from handlers.journal.directory import DirectoryJournal
from handlers.models.llava import LlavaModel
from handlers.requests.continuation import read_continuation
from handlers.requests.incoming import Incoming
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.conftest import Client, EndlessModel, Exchange, ServiceFactory, make_incoming
from tests.unit.handlers.test_chat_service import Hold
from torchmoor.wire import headers as wire
from torchmoor.wire.continuation import ContinuationRequest, MarkedPiece, MarkedPieceReader, PieceKind, join_request

HOT = {"do_sample": True, "temperature": 50.0, "max_new_tokens": 14}  # with a seed that the worker draws
LONG = {**HOT, "max_new_tokens": 40, "seed": 3}
MESSAGES = [{"role": "user", "content": "hello"}]
INPUTS = {"inputs": "hello", "stream": True}
LOGPROB = re.compile(rb'("log_?prob":)(-?[0-9.e-]+)')
COMPLETED_AT = re.compile(rb'"completed_at":[0-9]+')
PAINT = {"type": "object", "properties": {"colour": {"type": "string", "maxLength": 9}}, "additionalProperties": False}
NEVER = "zzzzzzzz"  # no answer has it
REQUEST_ID = {wire.REQUEST_ID: "one-id"}
RESPONSE = {**REQUEST_ID, wire.RESOURCE: "POST responses"}

BODIES: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = {  # body, headers, request settings
    "tgi": ({**INPUTS, "parameters": {**HOT, "details": True}}, {"accept": "text/event-stream"}, {}),
    "generate_stream": ({"inputs": "hello", "parameters": HOT}, {wire.TGI_ROUTE: wire.GENERATE_STREAM}, {}),
    "greedy": ({**INPUTS, "parameters": {"max_new_tokens": 14, "repetition_penalty": 1.5}}, {}, {}),
    "full text": ({**INPUTS, "parameters": {**HOT, "return_full_text": True}}, {}, {"inputs_form": "lmi-outputs"}),
    "lmi": ({**INPUTS, "parameters": {**HOT, "repetition_penalty": 1.3}}, {"accept": "application/jsonlines"}, {}),
    "lmi-outputs": ({**INPUTS, "parameters": {**HOT, "seed": 5}}, {}, {"inputs_form": "lmi-outputs"}),
    "lmi-json": ({"inputs": "hello", "parameters": {**HOT, "details": True}}, {}, {"inputs_form": "lmi-json"}),
    "openai": (
        {
            "messages": MESSAGES,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "logprobs": True,
            "temperature": 50.0,
            "max_tokens": 14,
        },
        REQUEST_ID,
        {},
    ),
    "stop strings": (  # which often begin, and never complete
        {
            "messages": MESSAGES,
            "stream": True,
            "logprobs": True,
            "temperature": 50.0,
            "max_tokens": 14,
            "stop": [f"{letter}{NEVER}" for letter in "aeinorst"],
        },
        REQUEST_ID,
        {},
    ),
    "least length": (  # stop strings that do not count before it
        {
            "messages": MESSAGES,
            "stream": True,
            "logprobs": True,
            "temperature": 50.0,
            "max_tokens": 14,
            "min_tokens": 9,
            "stop": list("aeinorst"),
        },
        REQUEST_ID,
        {},
    ),
    "cut call": (
        {
            "messages": MESSAGES,
            "stream": True,
            "tools": [{"type": "function", "function": {"name": "paint", "parameters": PAINT}}],
            "tool_choice": "required",
            "stop": ["}"],
            "temperature": 50.0,
            "max_tokens": 90,
        },
        REQUEST_ID,
        {},
    ),
    "grammar": ({**INPUTS, "parameters": {**HOT, "grammar": {"type": "regex", "value": "[a-f]{9,12}"}}}, {}, {}),
    "tools": (
        {
            "messages": MESSAGES,
            "stream": True,
            "tools": [{"type": "function", "function": {"name": "paint", "parameters": PAINT}}],
            "tool_choice": "required",
            "temperature": 50.0,
            "max_tokens": 90,
        },
        REQUEST_ID,
        {},
    ),
    "response": (
        {"model": "llava", "input": "hi", "stream": True, "store": False, "temperature": 50.0, "max_output_tokens": 14},
        RESPONSE,
        {},
    ),
    "response with log probabilities": (  # the last events have those of all tokens
        {
            "model": "llava",
            "input": "hi",
            "stream": True,
            "store": False,
            "temperature": 50.0,
            "max_output_tokens": 14,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        },
        RESPONSE,
        {},
    ),
    "top_p": ({**INPUTS, "parameters": {**HOT, "temperature": 3.0, "top_p": 0.9, "top_k": 40}}, {}, {}),
}


def begin(client: Client, incoming: Incoming) -> Exchange:
    """Send a request as the pump does, from a proxy that can continue its answer."""
    exchange = Exchange(reads_at_once=True)
    exchange.reply.may_mark = True
    with exchange.reply.guarded():
        incoming, exchange.reply.continuation = read_continuation(incoming)
        client.service.start(incoming, exchange.reply)
    return exchange


def pieces_of(exchange: Exchange) -> list[MarkedPiece]:
    """Return the pieces of a complete answer."""
    assert exchange.wait().status == 200, exchange.body
    return MarkedPieceReader().take(exchange.body)


def pieces_until_loss(begun: Exchange, hold: Hold, number: int, *, is_recorded: bool) -> list[MarkedPiece]:
    """Return the first pieces of an answer whose client is lost before it is recorded, or after."""
    if is_recorded:
        hold.release()
        return pieces_of(begun)[:number]
    begun.wait_until(lambda exchange: len(exchange.pieces) > number)
    hold.wait()
    pieces = MarkedPieceReader().take(begun.body)
    assert pieces[-1].kind is PieceKind.PART
    begun.reply.cancel()
    hold.release()
    begun.wait()
    return pieces


def rest_of(client: Client, body: Any, headers: Mapping[str, str], start: str, pieces: list[MarkedPiece]) -> Exchange:
    """Ask for what follows these pieces."""
    notes = b"".join(piece.note for piece in pieces).decode()
    request = ContinuationRequest("application/json", start, notes)
    length, joined = join_request(request, json.dumps(body).encode())
    return begin(client, make_incoming({**headers, wire.CONTINUATION: str(length)}, joined))


class Shown:
    """An answer's bytes, equal to others if the log probabilities differ by no more than rounding.

    A processor may round differently in steps of several tokens.
    """

    def __init__(self, *parts: list[MarkedPiece]) -> None:
        data = COMPLETED_AT.sub(b"", b"".join(piece.data for pieces in parts for piece in pieces))
        self.logprobs = [float(number) for _, number in LOGPROB.findall(data)]
        self.text = LOGPROB.sub(rb"\g<1>0", data)

    def __repr__(self) -> str:
        return f"{self.text!r} {self.logprobs}"

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Shown)
        return self.text == other.text and self.logprobs == pytest.approx(other.logprobs, abs=1e-3)

    __hash__ = None  # close numbers may not have equal hashes


def last_event(pieces: list[MarkedPiece]) -> Any:
    """Return the JSON of the last event of an event stream."""
    return json.loads(b"".join(piece.data for piece in pieces).split(b"data:")[-1])


def places_to_cut(pieces: list[MarkedPiece]) -> list[int]:
    """Return each place in a short answer; in a long one its beginning, its end, and every sixth between."""
    last = len(pieces) - 1
    return [cut for cut in range(len(pieces)) if last < 20 or cut < 3 or last - cut < 3 or cut % 6 == 0]


@pytest.mark.parametrize("name", BODIES)
def test_an_answer_that_is_cut_anywhere_goes_on_elsewhere(
    make_client: ServiceFactory, endless_llava: EndlessModel, name: str
) -> None:
    """Text, token ids, log probabilities, usage and form are those of the answer that was not cut.

    The other worker has had other requests, so its memory differs.
    """
    body, headers, request = BODIES[name]
    one, other = make_client(endless_llava, request=request), make_client(endless_llava, request=request)
    begun = begin(one, make_incoming(headers, body))
    whole = pieces_of(begun)
    assert [piece.kind for piece in whole] == [PieceKind.PART] * (len(whole) - 1) + [PieceKind.END]
    assert len(whole) > 3

    start = begun.headers[wire.CONTINUABLE]
    rests = {cut: rest_of(other, body, headers, start, whole[:cut]) for cut in places_to_cut(whole)}  # share steps
    for cut, rest in rests.items():
        assert Shown(whole[:cut], pieces_of(rest)) == Shown(whole), cut


def test_an_answer_beyond_an_end_token_goes_on_elsewhere(make_client: ServiceFactory) -> None:
    """The part that the client has may contain end tokens if the request ignores them, and only then."""
    one, other = make_client(), make_client()
    often = {"max_new_tokens": 9, "logit_bias": {"2": 100.0}}
    body = {**INPUTS, "parameters": {**often, "ignore_eos": True, "min_tokens": 3}}
    begun = begin(one, make_incoming({}, body))
    whole, start = pieces_of(begun), begun.headers[wire.CONTINUABLE]
    assert [piece.note == b"2," for piece in whole] == [False] * 3 + [True] * 5 + [False]  # the end has no tokens

    rests = [rest_of(other, body, {}, start, whole[:cut]) for cut in range(len(whole))]
    for cut, rest in enumerate(rests):
        assert Shown(whole[:cut], pieces_of(rest)) == Shown(whole), cut
    assert rest_of(other, {**INPUTS, "parameters": often}, {}, start, whole[:5]).wait().error == "InvalidRequest"


def test_a_stop_string_may_span_the_cut(make_client: ServiceFactory, endless_llava: EndlessModel) -> None:
    """Text that is held back because it may become a stop string is neither lost nor repeated."""
    one, other = make_client(endless_llava), make_client(endless_llava)
    body: dict[str, Any] = {**INPUTS, "parameters": {**HOT, "seed": 3}}
    text = last_event(pieces_of(begin(one, make_incoming({}, body))))["generated_text"]
    body["parameters"]["stop"] = [text[6:12]]
    begun = begin(one, make_incoming({}, body))
    whole = pieces_of(begun)

    start = begun.headers[wire.CONTINUABLE]
    rests = [rest_of(other, body, {}, start, whole[:cut]) for cut in range(len(whole))]
    for cut, rest in enumerate(rests):
        assert Shown(whole[:cut], pieces_of(rest)) == Shown(whole), cut


def test_the_details_name_the_seed_that_was_drawn(make_client: ServiceFactory, endless_llava: EndlessModel) -> None:
    """With it, a request gets the same answer again."""
    client = make_client(endless_llava)
    body, headers, _ = BODIES["tgi"]
    first, again = (last_event(pieces_of(begin(client, make_incoming(headers, body)))) for _ in range(2))
    seed = first["details"]["seed"]

    assert seed != again["details"]["seed"]
    body = {**body, "parameters": {**body["parameters"], "seed": seed}}
    repeated = last_event(pieces_of(begin(client, make_incoming(headers, body))))
    assert repeated["details"]["seed"] == seed
    assert repeated["generated_text"] == first["generated_text"]


TURNS: dict[str, dict[str, Any]] = {
    "session": {"type": "send_text_prompt", "prompt_text": "hello", "stream": True},
    "response": {"model": "llava", "input": "hello", "stream": True, "temperature": 50.0, "seed": 3},
}


@pytest.mark.parametrize("is_recorded", [False, True], ids=["lost", "only believed lost"])
@pytest.mark.parametrize("kind", TURNS)
def test_a_turn_is_recorded_once(
    make_client: ServiceFactory, endless_llava: EndlessModel, tmp_path: Path, kind: str, is_recorded: bool
) -> None:
    """A session's turn continues in another worker from the journal, also if the first worker has already recorded it.

    A response that opens its session keeps its id.
    """
    journal = DirectoryJournal(tmp_path, JournalSettings())
    one, other = (make_client(endless_llava, instance=name, journal=journal) for name in ("one", "other"))
    body = {**TURNS[kind], "max_output_tokens": 40} if kind == "response" else {**TURNS[kind], "parameters": LONG}
    if kind == "session":
        body["session_id"] = one.open()
    headers = {wire.INVOCATION_ID: "first"} | (RESPONSE if kind == "response" else {})
    hold = Hold(endless_llava, num_steps=5)
    begun = begin(one, make_incoming(headers, body))
    pieces = pieces_until_loss(begun, hold, 3, is_recorded=is_recorded)
    rest = pieces_of(rest_of(other, body, headers, begun.headers[wire.CONTINUABLE], pieces))

    (session,) = other.service.store.snapshot()
    answer = session.messages[-1]["content"][0]["text"]
    assert len(session.messages) == 2
    text = Shown(pieces, rest).text
    if kind == "session":
        assert text.decode() == answer
        again = begin(one, make_incoming({}, {**body, "session_id": one.open()}))
        assert Shown(pieces_of(again)).text.decode() == answer
    else:
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith(b"data: ")]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert "".join(event["delta"] for event in events if event["type"].endswith("delta")) == answer
        assert events[0]["response"]["id"] == events[-1]["response"]["id"]
        assert events[-1]["response"]["status"] == "incomplete"


def test_a_worker_that_fails_says_so(make_client: ServiceFactory, tiny_llava: LlavaModel) -> None:
    """An error of the worker itself is marked, because another worker can continue the answer."""
    failing = EndlessModel(tiny_llava)
    one, other = make_client(failing), make_client(EndlessModel(tiny_llava))
    body = {**INPUTS, "parameters": LONG}
    whole = pieces_of(begin(other, make_incoming({}, body)))

    def fail_later(embeds: object, batch: object) -> None:
        if failing.num_steps > 5:
            raise RuntimeError("the device is lost")

    failing.before_step = fail_later
    begun = begin(one, make_incoming({}, body))
    *pieces, failure = pieces_of(begun)

    assert failure.kind is PieceKind.FAILURE
    assert b"InternalError" in failure.data or b"the model failed" in failure.data
    rest = pieces_of(rest_of(other, body, {}, begun.headers[wire.CONTINUABLE], pieces))
    assert Shown(pieces, rest) == Shown(whole)


def test_an_answer_of_another_model_or_prompt_is_not_continued(make_client: ServiceFactory) -> None:
    """An answer of another model or prompt, or one whose request cannot be read, is refused."""
    client = make_client()
    body = {**INPUTS, "parameters": HOT}
    begun = begin(client, make_incoming({}, body))
    whole, start = pieces_of(begun), begun.headers[wire.CONTINUABLE]

    other_prompt = rest_of(client, {**body, "inputs": "other"}, {}, start, whole[:2]).wait()
    other_length = rest_of(client, {**body, "parameters": {**HOT, "max_new_tokens": 3}}, {}, start, whole[:2]).wait()
    foreign = rest_of(client, body, {}, start, [MarkedPiece(b"", b"^999999,", PieceKind.PART)]).wait()
    ended = rest_of(client, body, {}, start, [*whole[:-1], MarkedPiece(b"", b"5," * 20, PieceKind.PART)]).wait()

    assert [each.error for each in (other_prompt, other_length)] == ["TurnConflict"] * 2
    assert (foreign.error, ended.error) == ("InvalidRequest", "TurnConflict")
    for length, given in (("9", b'["a", 1, 2]'), ("x", b"{}"), ("2", b"{}"), ("3", b'"a"')):
        with pytest.raises(InvalidRequest):
            read_continuation(make_incoming({wire.CONTINUATION: length}, given))


def test_an_engine_that_cannot_resume_an_answer_refuses_it(
    make_client: ServiceFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that cannot resume an answer refuses a sampled one that another engine has begun."""
    one = make_client()
    monkeypatch.setattr(chat_engine, "Capabilities", lambda **own: Capabilities(**{**own, "can_resume": False}))
    other = make_client()
    body = {**INPUTS, "parameters": HOT}
    begun = begin(one, make_incoming({}, body))
    pieces = pieces_of(begun)

    refused = rest_of(other, body, {}, begun.headers[wire.CONTINUABLE], pieces[:2]).wait()

    assert (refused.status, refused.error) == (409, "TurnConflict")


def test_a_stream_has_no_marks_unless_the_proxy_asks(make_client: ServiceFactory) -> None:
    """A client without the proxy gets a stream without marks."""
    answer = make_client().call({**INPUTS, "parameters": {"max_new_tokens": 3}})

    assert answer.body.startswith(b"data:{")
    assert wire.CONTINUABLE not in answer.headers
