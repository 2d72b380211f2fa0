"""Every dialect on real TorchServe instances, used through its own published client."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import requests
from huggingface_hub import InferenceClient
from huggingface_hub.errors import BadRequestError, ValidationError
from tokenizers import Tokenizer

from tests.torchserve.conftest import ROOT, Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.openai_client import at_both_bases, gpt
from tests.torchserve.test_curl import curl
from torchmoor.wire.receipt import CONTEXT_TOKENS, PREFILL_TOKENS

__all__ = ["gpt"]  # a fixture
pytestmark = pytest.mark.torchserve

QUESTION = "What color is the circle?"
ROUTES = ("generate", "generate_stream")
JSON = ("-H", "Content-Type: application/json")


def picture(shape: str = "circle", colour: str = "red") -> str:
    return data_url(draw(shape, colour))


def prompt(text: str = QUESTION, image: str | None = None) -> str:
    """Return a prompt in the demo checkpoint's template."""
    return f"<s><|user|>{f'![]({image})' if image else ''}{text}<|end|><|assistant|>"


def conversation(text: str = QUESTION, image: str | None = None) -> Any:
    see = [{"type": "image_url", "image_url": {"url": image or picture()}}]
    return [{"role": "user", "content": [*see, {"type": "text", "text": text}]}]


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"Accept": "text/csv"}, "Accept: application/json"),
        ({"Body": b" " * (6 * 1024 * 1024 + 1)}, r"Request [0-9a-f-]{36} has oversize body\. .* 6291456 bytes"),
    ],
)
def test_boto3_raises_validation_errors_for_what_cannot_be_served(
    fleet: Fleet, members: dict[str, Any], problem: str
) -> None:
    """An Accept that no answer has, and a body above SageMaker's limit, are ValidationErrors in both operations."""
    client = fleet.client()
    request = {"EndpointName": "llava", "ContentType": "application/json", "Body": b'{"inputs": "x"}', **members}

    for invoke in (client.invoke_endpoint, client.invoke_endpoint_with_response_stream):
        with pytest.raises(client.exceptions.ValidationError, match=problem):
            invoke(**request)


def test_openai_client_sees_a_telephones_photo(gpt: openai.OpenAI) -> None:
    """A photo of 12 million pixels is answered; most of them are never decoded."""
    photo = "data:image/jpeg;base64," + base64.b64encode(draw("triangle", "green", (4032, 3024), "JPEG")).decode()

    answer = gpt.chat.completions.create(
        model="llava", messages=conversation("What color is the triangle?", photo), max_tokens=32
    )

    assert "green" in str(answer.choices[0].message.content)


@at_both_bases
def test_openai_client_sees_an_image(gpt: openai.OpenAI) -> None:
    """A whole answer has its counts and the endpoint's name as the model."""
    [model] = gpt.models.list()

    answer = gpt.chat.completions.create(model=model.id, messages=conversation(), max_tokens=32)

    [choice] = answer.choices
    assert "red" in str(choice.message.content)
    assert (choice.finish_reason, answer.model, answer.object) == ("stop", "llava", "chat.completion")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.id.startswith("chatcmpl-")
    assert choice.message.annotations == []


@at_both_bases
def test_openai_client_streams_a_conversation(gpt: openai.OpenAI) -> None:
    """Each turn contains the earlier ones; the pieces together are the whole answer."""
    messages = conversation()
    texts = []
    for question in ("What shape is this?", "How many shapes are there?"):
        with gpt.chat.completions.create(
            model="llava", messages=messages, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        texts.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage is not None
        messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": question}]

    whole = gpt.chat.completions.create(model="llava", messages=messages[:3])

    assert "red" in texts[0]
    assert whole.choices[0].message.content == texts[1]


@at_both_bases
def test_openai_client_raises_its_own_exceptions(gpt: openai.OpenAI) -> None:
    """The handler's code and field reach OpenAI's exceptions, in streams as well."""
    for is_streaming in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            gpt.chat.completions.create(
                model="llava", messages=conversation(), functions=[{"name": "f"}], stream=is_streaming
            )
        error = caught.value
        assert (error.code, error.param, error.type) == ("InvalidRequest", "functions", "invalid_request_error")
        assert error.request_id
    for image, code in (
        ("http://169.254.169.254/x.png", "invalid_image_url"),
        ("data:image/png;base64,aGVsbG8=", "invalid_image_format"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            gpt.chat.completions.create(model="llava", messages=conversation(image=image))
        assert caught.value.code == code


def test_openai_client_weighs_tokens(gpt: openai.OpenAI) -> None:
    """A bias decides each token; penalties are accepted; a token that the model lacks is refused by name."""

    def ask(**weights: Any) -> list[str]:
        answer = gpt.chat.completions.create(
            model="llava", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, logprobs=True, **weights
        )
        logprobs = answer.choices[0].logprobs
        return [each.token for each in logprobs.content or []]

    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "tiny-llava" / "tokenizer.json"))
    red = tokenizer.encode("a red", add_special_tokens=False).ids[-1]
    assert ask(logit_bias={str(red): 60}) == [" red"] * 4
    assert ask(logit_bias={str(red): 60}, frequency_penalty=-2, presence_penalty=2) == [" red"] * 4
    assert len(ask(frequency_penalty=2)) == 4
    with pytest.raises(openai.BadRequestError, match="but the model has") as caught:
        ask(logit_bias={"100000": 1})
    assert caught.value.param == "logit_bias"


def test_min_p_excludes_unlikely_tokens(gpt: openai.OpenAI, fleet: Fleet) -> None:
    """At a high temperature, 1 leaves the greedy answer and 0 excludes nothing, in each API."""
    hot: Any = {"model": "llava", "temperature": 50.0}

    def ask(**fields: Any) -> str:
        body = {"seed": 5, **fields}
        answer = gpt.chat.completions.create(**hot, messages=conversation(), max_tokens=16, extra_body=body)
        return answer.choices[0].message.content or ""

    def respond(**fields: Any) -> str:
        body = {"seed": 5, **fields}
        return gpt.responses.create(**hot, input="Hello", max_output_tokens=16, extra_body=body).output_text

    def proceed(**fields: Any) -> str:
        body = {"seed": 5, **fields}
        return gpt.completions.create(**hot, prompt=prompt(), max_tokens=16, extra_body=body).choices[0].text

    def generate(**fields: Any) -> str:
        body = {"inputs": prompt(), "parameters": {"temperature": 50, "seed": 5, "max_new_tokens": 16, **fields}}
        [answer] = requests.post(f"{fleet.runtime}/invocations", json=body, timeout=90).json()
        return str(answer["generated_text"])

    for own in (ask, respond, proceed, generate):
        assert own(min_p=1) == own(temperature=0)
        assert own(min_p=0) == own() != own(min_p=1)
    with pytest.raises(openai.BadRequestError, match="'min_p' must be a number from 0 to 1") as caught:
        ask(min_p=1.5)
    assert caught.value.param == "min_p"


def test_load_generators_get_answers_of_their_length(gpt: openai.OpenAI, fleet: Fleet) -> None:
    """Answers have the length that vLLM's, SGLang's and TGI's clients ask for, whole and streamed.

    With vLLM's `continuous_usage_stats`, the chunks of a stream count its tokens.
    """
    exactly: Any = {"model": "llava", "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    least: Any = {"model": "llava", "max_tokens": 40, "extra_body": {"min_tokens": 40}}

    for options in (exactly, least):
        answer = gpt.chat.completions.create(messages=conversation(), **options)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 40
        running: Any = {"include_usage": True, "continuous_usage_stats": True}
        with gpt.completions.create(prompt=prompt(), stream=True, stream_options=running, **options) as stream:
            *chunks, last = stream
        assert last.usage.completion_tokens == 40
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert (len(counts), counts) == (len(chunks), sorted(counts))
        assert counts[-1] == 40
    parameters = {"max_new_tokens": 40, "ignore_eos_token": True, "details": True}
    [whole] = requests.post(
        f"{fleet.runtime}/invocations", json={"inputs": prompt(), "parameters": parameters}, timeout=90
    ).json()
    assert (whole["details"]["generated_tokens"], whole["details"]["finish_reason"]) == (40, "length")
    with pytest.raises(openai.BadRequestError, match="min_tokens must be at most 3") as caught:
        gpt.chat.completions.create(
            model="llava", messages=conversation(), max_tokens=3, extra_body={"min_tokens": 4, "ignore_eos": True}
        )
    assert caught.value.param == "min_tokens"


@at_both_bases
def test_openai_client_continues_a_prompt(gpt: openai.OpenAI, fleet: Fleet) -> None:
    """Completions continue the prompt as TGI's `inputs` do, whole and streamed."""
    body = {"inputs": prompt(), "parameters": {"max_new_tokens": 8}}
    [own] = requests.post(f"{fleet.runtime}/invocations", json=body, timeout=90).json()

    whole = gpt.completions.create(model="llava", prompt=prompt(), max_tokens=8)
    with gpt.completions.create(model="llava", prompt=prompt(), max_tokens=8, stream=True) as stream:
        streamed = "".join(chunk.choices[0].text for chunk in stream)

    assert whole.choices[0].text == streamed == own["generated_text"]
    assert whole.usage is not None
    assert whole.object == "text_completion"
    with pytest.raises(openai.BadRequestError, match="token ids are not read"):
        gpt.completions.create(model="llava", prompt=[1, 2])


def test_openai_client_reads_log_probabilities_of_a_prompt(gpt: openai.OpenAI) -> None:
    """A whole answer and a stream have the same tokens, places and likeliest tokens."""
    asked: dict[str, Any] = {"model": "llava", "prompt": "The circle is", "max_tokens": 5, "logprobs": 2}
    whole = gpt.completions.create(**asked).choices[0]
    streamed = [event.choices[0] for event in gpt.completions.create(**asked, stream=True)]

    told = [choice.logprobs for choice in streamed if choice.logprobs is not None]
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for each in told for value in getattr(each, name)] == getattr(whole.logprobs, name)
    tokens, offsets = whole.logprobs.tokens or [], whole.logprobs.text_offset or []
    assert "".join(tokens) == whole.text
    assert [whole.text[offset:].startswith(token) for token, offset in zip(tokens, offsets, strict=True)]
    assert {len(top) for top in whole.logprobs.top_logprobs or []} == {2}


@pytest.mark.parametrize("base", ["/v1", "/endpoints/llava/openai/v1"])
def test_a_chat_completion_needs_a_model(fleet: Fleet, base: str) -> None:
    """A chat completion without a model is refused on OpenAI's own path only, as conformance suites expect."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

    refused = requests.post(f"{fleet.runtime}{base}/chat/completions", json=body, timeout=90)
    served = requests.post(f"{fleet.runtime}/endpoints/llava/invocations", json=body, timeout=90)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert served.status_code == 200


def test_openai_client_reads_an_instance_itself(fleet: Fleet) -> None:
    """Without a proxy, the body selects the dialect on TorchServe's own path."""
    instance = fleet.instances()[0]
    base = f"http://{instance['host']}:{instance['port']}/predictions/llava/1.0/v1"
    with openai.OpenAI(base_url=base, api_key="any", timeout=90, max_retries=0) as client:
        answer = client.chat.completions.create(model="llava", messages=conversation(), max_tokens=32)
        stream = client.chat.completions.create(model="llava", messages=conversation(), max_tokens=32, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="llava", messages=[])

    assert answer.choices[0].message.content == streamed
    assert "red" in streamed
    assert caught.value.param == "messages"


@pytest.mark.parametrize("path", ["", "/invocations", "/endpoints/llava/invocations", "/predictions/llava"])
def test_huggingface_client_generates(fleet: Fleet, path: str) -> None:
    """text_generation reads TGI's form: text, details, and both kinds of streams."""
    client = InferenceClient(fleet.runtime + path, timeout=90)
    text = prompt(image=picture())

    plain = client.text_generation(text, max_new_tokens=32)
    detailed = client.text_generation(text, max_new_tokens=32, details=True)
    full = client.text_generation(prompt("Hello"), max_new_tokens=2, return_full_text=True, stop=["x"])
    pieces = list(client.text_generation(text, max_new_tokens=32, stream=True))
    tokens = list(client.text_generation(text, max_new_tokens=32, stream=True, details=True))

    assert "red" in plain
    assert plain == detailed.generated_text == "".join(pieces) == tokens[-1].generated_text
    assert detailed.details.generated_tokens == len(detailed.details.tokens) == len(tokens)
    assert [token.index for token in tokens] == list(range(1, len(tokens) + 1))
    assert detailed.details.finish_reason == "eos_token"
    assert full.startswith(prompt("Hello"))


def test_huggingface_client_chats(fleet: Fleet) -> None:
    """chat_completion uses OpenAI's dialect."""
    client = InferenceClient(base_url=fleet.runtime, timeout=90)

    answer = client.chat_completion(conversation(), max_tokens=32)
    stream = client.chat_completion(conversation(), max_tokens=32, stream=True)

    text = answer.choices[0].message.content
    assert "red" in str(text)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_huggingface_client_hears_of_its_mistake(fleet: Fleet) -> None:
    """The error names the unsupported parameter."""
    client = InferenceClient(fleet.runtime + "/invocations", timeout=90)

    with pytest.raises(BadRequestError, match="best_of"):
        client.text_generation(prompt(), best_of=3)


def test_tgis_routes_answer_its_clients(fleet: Fleet) -> None:
    """/generate is never streamed and /generate_stream always is, whatever `stream` says."""
    whole, streamed = (InferenceClient(f"{fleet.runtime}/{route}", timeout=90) for route in ROUTES)
    text = prompt(image=picture())
    body = {"inputs": text, "parameters": {"max_new_tokens": 32}}

    detailed = whole.text_generation(text, max_new_tokens=32, details=True)
    tokens = list(streamed.text_generation(text, max_new_tokens=32, stream=True, details=True))
    plain = requests.post(f"{fleet.runtime}/generate", json={**body, "stream": True}, timeout=90)
    events = requests.post(f"{fleet.runtime}/generate_stream", json=body, timeout=90)
    server = InferenceClient(fleet.runtime, provider="hf-inference", timeout=90)

    assert "red" in detailed.generated_text
    assert plain.json() == {"generated_text": detailed.generated_text}
    assert tokens[-1].generated_text == "".join(each.token.text for each in tokens) == detailed.generated_text
    assert [each.token.id for each in tokens] == [each.id for each in detailed.details.tokens]
    assert events.headers["content-type"] == "text/event-stream"
    assert len(events.text.splitlines()) == 2 * len(tokens)
    assert (server.health_check(), server.get_endpoint_info()["model_id"]) == (True, "llava")
    for client in (whole, streamed, InferenceClient(fleet.runtime, timeout=90)):
        with pytest.raises(ValidationError, match="best_of"):
            client.text_generation(text, best_of=3)


def lines(stream: Any) -> Iterator[bytes]:
    """Join parts into lines, as the line iterators in AWS's examples do."""
    held = b""
    for event in stream:
        held += event["PayloadPart"]["Bytes"]
        while (end := held.find(b"\n")) >= 0:
            yield held[:end]
            held = held[end + 1 :]
    assert held == b""


def invoke_stream(fleet: Fleet, body: Any, **arguments: str) -> Any:
    return fleet.client().invoke_endpoint_with_response_stream(
        EndpointName="llava", ContentType="application/json", Body=json.dumps(body), **arguments
    )["Body"]


def test_published_tgi_reader_reads_the_stream(fleet: Fleet) -> None:
    """The published line iterator reads boto3's parts, `data:` and JSON unchanged, without an Accept."""
    body = {"inputs": prompt(image=picture()), "parameters": {"max_new_tokens": 32}, "stream": True}

    events = [
        json.loads(line[line.find(b"{") :].decode()) for line in lines(invoke_stream(fleet, body)) if b"{" in line
    ]

    text = "".join(event["token"]["text"] for event in events if not event["token"]["special"])
    assert "red" in text
    assert events[-1]["generated_text"] == text


def test_published_lmi_reader_reads_the_stream(fleet: Fleet) -> None:
    """Every line of the stream is JSON."""
    body = {"inputs": prompt(image=picture()), "parameters": {"max_new_tokens": 32}, "stream": True}

    events = [json.loads(line) for line in lines(invoke_stream(fleet, body, Accept="application/jsonlines"))]

    text = "".join(event["token"]["text"] for event in events)
    assert "red" in text
    assert events[-1]["generated_text"] == text
    assert events[-1]["details"]["finish_reason"] == "eos_token"


def test_boto3_invokes_each_dialect(fleet: Fleet) -> None:
    """InvokeEndpoint returns whole answers of all three dialects with the same text."""
    client = fleet.client()

    def invoke(body: Any, **arguments: str) -> Any:
        answer = client.invoke_endpoint(
            EndpointName="llava", ContentType="application/json", Body=json.dumps(body), **arguments
        )
        return json.loads(answer["Body"].read())

    raw = {"inputs": prompt(image=picture()), "parameters": {"max_new_tokens": 32}}
    [tgi] = invoke(raw)
    lmi = invoke(raw, Accept="application/jsonlines")
    chat = invoke({"messages": conversation(), "max_tokens": 32})

    assert "red" in tgi["generated_text"]
    assert tgi["generated_text"] == lmi["generated_text"] == chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize("num_choices", [1, 2])
def test_events_of_chat_completions_name_their_charset(fleet: Fleet, num_choices: int) -> None:
    """requests reads a text without a charset as ISO 8859-1. OpenAI's events name UTF-8, too."""
    schema = {"type": "object", "properties": {"city": {"const": "Malmö"}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "Where?"}], "response_format": form, "n": num_choices}

    answer = requests.post(
        f"{fleet.runtime}/v1/chat/completions", json={**body, "model": "llava", "stream": True}, timeout=90
    )

    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.count("ö") == num_choices


def test_events_of_responses_name_their_charset(fleet: Fleet) -> None:
    """A stream, a repeated one, and one in the background."""
    address, body = f"{fleet.runtime}/v1/responses", {"model": "llava", "input": "hello", "stream": True}
    first = requests.post(address, json=body, timeout=90)
    response_id = json.loads(first.text.splitlines()[1].removeprefix("data: "))["response"]["id"]
    repeated = requests.get(f"{address}/{response_id}", params={"stream": "true"}, timeout=90)
    queued = requests.post(address, json={**body, "background": True}, timeout=90)

    types = {answer.headers["content-type"] for answer in (first, repeated, queued)}

    assert types == {"text/event-stream; charset=utf-8"}


@pytest.mark.needs("curl")
def test_curl_speaks_each_dialect(fleet: Fleet) -> None:
    """curl shows the streams as sent on the wire."""
    chat = json.dumps({"model": "llava", "messages": [{"role": "user", "content": QUESTION}], "stream": True})
    raw = json.dumps({"inputs": prompt(), "parameters": {"max_new_tokens": 8}, "stream": True})

    status, headers, body = curl(*JSON, "-d", chat, fleet.runtime + "/v1/chat/completions")
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), body
    assert body.startswith("data: {")
    assert body.endswith("data: [DONE]\n\n")

    status, headers, body = curl(*JSON, "-d", raw, fleet.runtime + "/invocations")
    assert (status, headers["content-type"]) == (200, "text/event-stream"), body
    assert body.startswith("data:{")

    accept = ("-H", "Accept: application/jsonlines")
    status, headers, body = curl(*JSON, *accept, "-d", raw, fleet.runtime + "/invocations")
    assert (status, headers["content-type"]) == (200, "application/jsonlines"), body
    assert all(json.loads(line)["token"] for line in body.splitlines())


@pytest.mark.needs("curl")
def test_curl_without_a_content_type_is_advised(fleet: Fleet) -> None:
    """curl's -d sends a form, of which TorchServe leaves no body; the error says which header is missing."""
    status, _, body = curl("-d", '{"inputs": "hi"}', fleet.runtime + "/v1/chat/completions")

    assert status == 400
    assert "was read as a form; send JSON with Content-Type: application/json" in json.loads(body)["error"]["message"]


def test_text_beyond_ascii_comes_whole(fleet: Fleet) -> None:
    """Each piece on the network contains whole characters, in every dialect, for sampled text of every kind."""
    hot = {"do_sample": True, "temperature": 50.0, "seed": 5, "max_new_tokens": 120}
    body = {"inputs": prompt(), "parameters": hot, "stream": True}
    whole = requests.post(fleet.runtime + "/invocations", json={**body, "stream": False}, timeout=90).json()

    with requests.post(fleet.runtime + "/invocations", json=body, stream=True, timeout=90) as answer:
        pieces = [piece.decode() for piece in answer.raw.stream() if piece]

    events = [json.loads(line[5:]) for line in "".join(pieces).split("\n") if line]
    assert "".join(event["token"]["text"] for event in events) == whole[0]["generated_text"]
    assert any(not event["token"]["text"].isascii() for event in events)


def test_an_affinity_key_keeps_a_conversation_on_its_instance(fleet: Fleet) -> None:
    """Each turn finds the earlier ones in one instance's cache, and no log contains the key."""
    key = "a-conversation-of-the-test"
    messages = conversation()
    homes = set()
    with openai.OpenAI(base_url=f"{fleet.runtime}/v1", api_key="any", timeout=90, max_retries=0) as client:
        for turn in range(4):
            answer = client.chat.completions.with_raw_response.create(
                model="llava", messages=messages, max_tokens=8, prompt_cache_key=key
            )
            homes.add(answer.headers["x-torchmoor-instance"])
            assert answer.headers["x-amzn-sagemaker-invoked-routing-reason"] == "affinity"
            num_prefill, num_context = (int(answer.headers[name]) for name in (PREFILL_TOKENS, CONTEXT_TOKENS))
            assert not turn or num_prefill < num_context / 2
            text = answer.parse().choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "What shape is it?"}]

    assert len(homes) == 1
    logs = [path for path in fleet.run_dir.parent.rglob("*.log*") if path.is_file()]
    assert logs
    assert not any(key.encode() in path.read_bytes() for path in logs)


@pytest.mark.parametrize("base", ["", "/v1", "/endpoints/llava/openai/v1"])
def test_tokens_of_a_prompt_and_their_text(fleet: Fleet, base: str) -> None:
    """Tokenizing and detokenizing have vLLM's form, on its paths and on OpenAI's."""
    prompt = {"model": "llava", "prompt": "What color is the circle?"}
    shown = requests.post(f"{fleet.runtime}{base}/tokenize", json=prompt, timeout=60).json()
    text = requests.post(f"{fleet.runtime}{base}/detokenize", json={"tokens": shown["tokens"]}, timeout=60).json()

    assert shown["count"] == len(shown["tokens"]) > 3
    assert text["prompt"].endswith("What color is the circle?")
