"""Fields that clients of OpenAI's and TGI's APIs send and read, which not all servers of these APIs have."""

import json
from typing import Any

import jsonschema
import pytest
import torch

from handlers.chat.dialects.reasoning_fields import is_reasoning, read_reasoning
from handlers.chat.parameters import parse_parameters
from handlers.errors import InvalidRequest
from tests.unit.handlers.conftest import EndlessModel, ServiceFactory, make_incoming, parse
from tests.unit.handlers.test_chat_completion import chat, events, user
from tests.unit.handlers.test_response_form import read
from torchmoor.proxy.api.reference import openai_schemas
from torchmoor.wire import headers as wire

PAINT = {"name": "paint", "parameters": {"type": "object", "properties": {"colour": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": PAINT}]
CALLS = "Both.\n" + "\n".join(
    f'<tool_call>\n{{"name": "paint", "arguments": {{"colour": "{colour}"}}}}\n</tool_call>'
    for colour in ("red", "blue")
)
RUNNING = {"include_usage": True, "continuous_usage_stats": True}


def dictate(model: EndlessModel, text: str) -> int:
    """Let the model write this text, again and again. Return the number of its tokens."""
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    first = model.num_steps + 1

    def only(logits: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(logits, -torch.inf)
        chosen[:, ids[(model.num_steps - first) % len(ids)]] = 0.0
        return chosen

    model.after_step = only
    return len(ids)


@pytest.mark.parametrize("is_parallel", [True, False])
def test_an_answer_has_one_call_if_calls_must_not_be_parallel(
    make_client: ServiceFactory, endless_llava: EndlessModel, is_parallel: bool
) -> None:
    """A model that may call, and writes two calls, is stopped after the first."""
    client = make_client(endless_llava)
    fields = {"tools": TOOLS, "parallel_tool_calls": is_parallel}
    length = dictate(endless_llava, CALLS)
    body = chat(user("Paint!"), max_tokens=length, **fields)

    whole = client.call(body).json
    dictate(endless_llava, CALLS)
    streamed = [event["choices"][0] for event in events(client.call({**body, "stream": True}).body)]
    dictate(endless_llava, CALLS)
    request = {"model": "llava", "input": "Paint!", "max_output_tokens": length, **fields}
    response = client.call(
        {**request, "tools": [{"type": "function", **PAINT}]}, {wire.RESOURCE: "POST responses"}
    ).json

    colours = ["red", "blue"] if is_parallel else ["red"]
    [choice] = whole["choices"]
    called = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
    assert [json.loads(arguments)["colour"] for arguments in called] == colours
    assert choice["message"]["content"] == "Both."
    assert choice["finish_reason"] == streamed[-1]["finish_reason"] == ("length" if is_parallel else "tool_calls")
    assert (whole["usage"]["completion_tokens"] == length) == is_parallel
    deltas = [call for each in streamed for call in each["delta"].get("tool_calls", [])]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == "".join(called)
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    assert [json.loads(item["arguments"])["colour"] for item in calls] == colours
    assert (response["status"] == "completed") == (not is_parallel)


def test_the_tokens_of_tgis_stream_are_numbered(make_client: ServiceFactory, endless_llava: EndlessModel) -> None:
    body = {"inputs": "Hello", "stream": True, "parameters": {"max_new_tokens": 5, "stop": ["never"]}}

    streamed = events(make_client(endless_llava).call(body).body)

    assert [event["index"] for event in streamed] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "body", [chat(user("Hello")), {"prompt": "Hello", "max_tokens": 16, "n": 2, "temperature": 1.0, "seed": 1}]
)
def test_each_chunk_has_the_usage_so_far(
    make_client: ServiceFactory, endless_llava: EndlessModel, body: dict[str, Any]
) -> None:
    """As from vLLM, whose load generators ask for it; each choice counts its own tokens."""
    answer = make_client(endless_llava).call({**body, "stream": True, "stream_options": RUNNING})

    *chunks, last = events(answer.body)
    for index in range(body.get("n", 1)):
        own = [each for each in chunks if each["choices"][0]["index"] == index]
        counts = [each["usage"]["completion_tokens"] for each in own if each["usage"]]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, 16)
        assert all(each["usage"] or "role" in each["choices"][0]["delta"] for each in own)
    prompt = last["usage"]["prompt_tokens"]
    for usage in (each["usage"] for each in chunks if each["usage"]):
        assert usage["prompt_tokens"] == prompt
        assert usage["total_tokens"] == prompt + usage["completion_tokens"]


def test_usage_so_far_needs_the_usage(make_client: ServiceFactory, endless_llava: EndlessModel) -> None:
    client = make_client(endless_llava)
    body = chat(user("Hello"), stream=True, stream_options={"continuous_usage_stats": True})

    assert not any("usage" in event for event in events(client.call(body).body))


@pytest.mark.parametrize("number", [0, -1])
def test_top_k_of_none_is_the_default_of_lmi_and_vllm(client: Any, number: int) -> None:
    """It does not start sampling either."""
    assert parse_parameters({"top_k": number}) == parse_parameters({})
    plain = client.call(chat(user("Hello")))
    assert client.call(chat(user("Hello"), top_k=number)).json["choices"] == plain.json["choices"]


NEUTRAL = {
    "best_of": 1,
    "early_stopping": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop_token_ids": [],
}


def test_parameters_of_vllm_pass_with_values_that_have_no_effect(client: Any) -> None:
    """LMI's documentation names them with these defaults. With another value they are refused by name."""
    assert parse_parameters({**NEUTRAL, "n": 1, "num_beams": 1}) == parse_parameters({})
    for body in (chat(user("Hello"), **NEUTRAL), {"prompt": "Hello", **NEUTRAL}):
        assert client.call(body).status == 200
    for name, other in {**dict.fromkeys(NEUTRAL, 2), "stop_token_ids": [3], "length_penalty": True}.items():
        with pytest.raises(InvalidRequest) as refused:
            parse_parameters({name: other})
        assert refused.value.param == f"parameters.{name}"
        assert client.call(chat(user("Hello"), **{name: other})).json["error"]["param"] == name


def test_arguments_of_a_repeated_call_may_be_an_object(client: Any) -> None:
    """As some frameworks send them; OpenAI's clients send text."""
    prompts = []
    for arguments in ('{"colour": "red"}', {"colour": "red"}):
        call = {"id": "a", "type": "function", "function": {"name": "paint", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        messages = [user("Paint!"), said, {"role": "tool", "tool_call_id": "a", "content": "Done"}]
        jsonschema.validate(messages, openai_schemas.CHAT["properties"]["messages"])
        answer = client.call({"messages": messages}, {wire.RESOURCE: "POST tokenize"})
        assert answer.status == 200, answer.body
        prompts.append(answer.json["tokens"])

    assert prompts[0] == prompts[1]
    call["function"]["arguments"] = ["red"]
    assert "arguments as a text or an object" in client.call(chat(said)).json["error"]["message"]


def test_a_message_may_have_labels_of_its_client(client: Any) -> None:
    """lm-evaluation-harness sends a type, editors an id, LiteLLM a cache_control."""
    labels = {"id": 7, "type": "text", "metadata": {"a": [1]}, "cache_control": {"type": "ephemeral"}}
    plain = client.call(chat({"role": "user", "content": "Hello"}))

    labelled = client.call(chat({"role": "user", "content": "Hello", **labels}))

    assert labelled.json["choices"] == plain.json["choices"]
    assert (
        client.call(chat({"role": "user", "content": "Hello", "prefix": True})).json["error"]["param"] == "messages[0]"
    )


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *dict.fromkeys(
            ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), "response_format"
        ).items(),
        ("enable_thinking", "chat_template_kwargs"),
        ("thinking", "reasoning_effort"),
    ],
)
def test_fields_of_other_servers_are_refused_with_the_field_to_use(client: Any, name: str, field: str) -> None:
    error = client.call(chat(user("Hello"), **{name: {"type": "object"}})).json["error"]

    assert error["param"] == name
    assert f"'{field}'" in error["message"]


@pytest.mark.parametrize("tier", ["auto", "default"])
def test_an_answer_names_the_service_tier_if_its_request_does(client: Any, tier: str) -> None:
    whole = client.call(chat(user("Hello"), service_tier=tier)).json
    streamed = events(client.call(chat(user("Hello"), service_tier=tier, stream=True)).body)

    assert {whole["service_tier"], *(event["service_tier"] for event in streamed)} == {"default"}
    assert "service_tier" not in client.call(chat(user("Hello"))).json


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"effort": None, "context": "auto", "mode": "standard"}, ""),
        ({"generate_summary": "auto"}, ""),
        ({"effort": "low", "summary": None, "context": None}, "reasoning"),
    ],
)
def test_reasoning_has_the_members_of_openais_type(given: dict[str, Any], field: str) -> None:
    assert is_reasoning(given)
    assert read_reasoning({"reasoning": given})["reasoning_field"] == field


@pytest.mark.parametrize("given", [{"context": "all_turns"}, {"mode": "pro"}, {"effort": []}, {"tone": "kind"}, []])
def test_reasoning_that_would_have_an_effect_is_refused(given: Any) -> None:
    assert not is_reasoning(given)


def test_a_response_takes_what_the_codex_cli_sends(client: Any) -> None:
    """Its requests have metadata of their own, which have no effect and are not stored."""
    own = {"internal_chat_message_metadata_passthrough": {"turn_id": "t1", "create_time": 1.5}}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}], **own},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}], **own},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}], "encrypted_content": None, **own},
        {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "a", **own},
        {"type": "function_call_output", "call_id": "a", "output": "done", **own},
    ]
    body = {
        "model": "llava",
        "instructions": "You are an agent.",
        "input": items,
        "tools": [{"type": "function", **PAINT, "strict": False}, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "store": True,
        "stream": False,
        "include": [],
        "prompt_cache_key": "thread",
        "client_metadata": {"x-codex-installation-id": "i"},
    }

    response = client.call(body, {wire.RESOURCE: "POST responses"})

    assert response.status == 200, response.body
    listed = client.call(None, {wire.RESOURCE: f"GET responses/{response.json['id']}/input_items?order=asc"}).json
    assert [item["type"] for item in listed["data"]] == [item["type"] for item in items]
    assert not any(own.keys() & item.keys() for item in listed["data"])
    assert "client_metadata" not in response.json


def test_a_response_in_the_background_does_not_store_what_has_no_effect() -> None:
    """Its other fields wait in the journal until a worker takes it."""
    body = {"model": "llava", "input": "Hello", "background": True, "temperature": 0.5, "client_metadata": {"a": "b"}}

    queued = parse(make_incoming({wire.RESOURCE: "POST responses"}, body))

    assert json.loads(queued.request)["request"].keys() == {"model", "background", "temperature", "seed"}


def test_a_response_repeats_its_reasoning(client: Any) -> None:
    body = {"model": "llava", "input": "Hello", "stream": True, "reasoning": {"context": "auto"}}

    answer = client.call(body, {wire.RESOURCE: "POST responses"})

    assert answer.status == 200, answer.body
    assert read(answer.body)[-1]["response"]["reasoning"] == {"effort": None, "summary": None, "context": "auto"}
