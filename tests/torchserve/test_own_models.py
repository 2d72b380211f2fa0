"""A user's own checkpoints under their own names, in one fleet: an archive of `torchmoor package`, which sees images,
SmolLM2-135M-Instruct with its real weights in a directory, and a checkpoint in S3.

Each has one instance, which runs one request at a time and has a queue.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import openai
import pytest
import requests
import torch
from botocore.exceptions import ClientError
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.make_smollm2 import TARGET
from tests.servers import S3Server
from tests.tools import missing
from tests.torchserve.conftest import ROOT, TORCHMOOR, Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.unit.handlers.tiny_checkpoints import PLAIN, save
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.s3]

DEMO = ROOT / "models" / "tiny-llava"
BUCKET = "own-models"
PACKAGED = "packaged"
TEXT = "llm"
OLD = "old"  # a GPT-2 in S3, which does not run in packed steps
SHORT = 200  # tokens


@pytest.fixture(scope="module")
def own(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run a renamed archive, a checkpoint with a serving.properties of its own, and one in S3."""
    if not TARGET.is_dir():
        missing("there is no SmolLM2: make archives downloads it")
    folder = tmp_path_factory.mktemp("own-models")
    mine = folder / "smollm2"
    mine.mkdir()
    for path in TARGET.iterdir():
        (mine / path.name).symlink_to(path)
    options = {"max_model_len": SHORT, "output_formatter": "json"}
    (mine / "serving.properties").write_text("".join(f"option.{name}={value}\n" for name, value in options.items()))
    save(PLAIN["gpt2"](), folder / "tiny-gpt2", DEMO)
    client = s3_server.client()
    client.create_bucket(Bucket=BUCKET)
    for path in (folder / "tiny-gpt2").iterdir():
        client.upload_file(str(path), BUCKET, f"tiny/{path.name}")
    client.close()
    (folder / "store").mkdir()
    command = [str(TORCHMOOR), "package", str(DEMO), "-o", str(folder / "store" / "demo.mar")]
    subprocess.run(command, check=True, timeout=60)
    (folder / "store" / "demo.mar").rename(folder / "store" / f"{PACKAGED}.mar")
    with run_fleet(
        *(str(mine), "--name", TEXT, f"s3://{BUCKET}/tiny", "--name", OLD),
        *("--model-store", str(folder / "store"), "--endpoint", PACKAGED, "--capacity", "1", "--late-binding"),
        run_dir=folder / "run",
        log=folder / "up.log",
        environment={**s3_server.environment, "TORCHMOOR_HANDLER_MODEL_CACHE_DIR": str(folder / "cache")},
    ) as fleet:
        yield fleet


@pytest.fixture
def gpt(own: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=own.runtime + "/v1", api_key="any", timeout=90, max_retries=0) as client:
        yield client


def open_session(client: Any, endpoint: str, body: dict[str, Any]) -> str:
    opened = client.invoke_endpoint(
        EndpointName=endpoint,
        SessionId="NEW_SESSION",
        ContentType="application/json",
        Body=json.dumps(body),
    )
    return opened["NewSessionId"].partition(";")[0]


def ask(client: Any, endpoint: str, session: str, question: str) -> list[str]:
    """Return the pieces of a streamed answer."""
    body = {"type": "send_text_prompt", "prompt_text": question, "stream": True, "parameters": {"max_new_tokens": 40}}
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName=endpoint, SessionId=session, ContentType="application/json", Body=json.dumps(body)
    )
    return [event["PayloadPart"]["Bytes"].decode() for event in answer["Body"]]


def test_a_model_answers_boto3_under_its_name(own: Fleet) -> None:
    """A session with an image is opened, and a question about it is answered."""
    client = own.client()
    opened = client.invoke_endpoint(
        EndpointName=PACKAGED, SessionId="NEW_SESSION", ContentType="image/png", Body=draw("circle", "red")
    )
    session = opened["NewSessionId"].partition(";")[0]

    answer = client.invoke_endpoint(
        EndpointName=PACKAGED,
        SessionId=session,
        ContentType="application/json",
        Body=json.dumps({"type": "send_text_prompt", "prompt_text": "What color is the circle?"}),
    )

    assert f"{PACKAGED}-0" in session
    assert json.load(answer["Body"]) == {"response_text": "The circle is red."}


def test_models_report_whether_they_read_images(own: Fleet) -> None:
    """The chat page gets each endpoint's image support and number of images per session."""
    seeing = {PACKAGED: True, TEXT: False, OLD: False}
    wanted = {name: {"can_see": can_see, "max_images": 8} for name, can_see in seeing.items()}

    def capabilities() -> Any:
        return requests.get(f"{own.runtime}/chat/endpoints", timeout=10).json()["capabilities"]

    wait_until(lambda: capabilities() == wanted, "each endpoint has reported its capabilities")


def test_a_models_own_settings_are_its_own(gpt: openai.OpenAI) -> None:
    """serving.properties beside one checkpoint limits its context; the same question fits the other."""
    question: Any = [{"role": "user", "content": "What color is the circle? " * 40}]
    with pytest.raises(openai.BadRequestError, match=f"at most {SHORT - 1}"):
        gpt.chat.completions.create(model=TEXT, messages=question, max_tokens=8)
    answer = gpt.chat.completions.create(model=PACKAGED, messages=question, max_tokens=8)

    assert answer.choices[0].message.content is not None


def test_a_model_without_packed_steps_answers_like_any_other(own: Fleet) -> None:
    """A session and a raw prompt give transformers' own greedy answers; the log states the cost."""
    folder = own.run_dir.parent / "tiny-gpt2"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    client, parameters = own.client(), {"max_new_tokens": 12}
    messages: list[dict[str, str]] = []

    def complete(prompt: str) -> str:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            output = model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
        return str(tokenizer.decode(output, skip_special_tokens=True))

    def ask(body: dict[str, object], **session: str) -> Any:
        answer = client.invoke_endpoint(
            EndpointName=OLD, ContentType="application/json", Body=json.dumps(body), **session
        )
        return json.load(answer["Body"])

    opened = client.invoke_endpoint(
        EndpointName=OLD, SessionId="NEW_SESSION", ContentType="application/json", Body=b'{"requestType":"NEW_SESSION"}'
    )
    session = opened["NewSessionId"].partition(";")[0]
    for question in ("Hello", "And now?"):
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        turn = {"type": "send_text_prompt", "prompt_text": question, "parameters": parameters}
        found = ask(turn, SessionId=session)["response_text"]
        assert found == complete(prompt)
        assert ask({"inputs": prompt, "parameters": parameters}) == [{"generated_text": found}]
        messages.append({"role": "assistant", "content": found})
    assert "do not run in packed steps" in "".join(log.read_text() for log in own.run_dir.rglob("*.log"))


def test_a_text_model_streams_a_right_answer(own: Fleet) -> None:
    """Real weights answer a factual question, and the second turn continues from the first."""
    client = own.client()
    session = open_session(client, TEXT, {"requestType": "NEW_SESSION"})

    pieces = ask(client, TEXT, session, "What is the capital of France?")
    followed = ask(client, TEXT, session, "And in which country is that city?")

    assert "llm-0" in session
    assert len(pieces) > 1
    assert "".join(pieces) == "The capital of France is Paris."
    assert "France" in "".join(followed)


def test_a_text_model_refuses_an_image(own: Fleet) -> None:
    """An image is refused with the reason, and no session is opened."""
    with pytest.raises(ClientError, match="text only"):
        open_session(own.client(), TEXT, {"type": "start_session", "image": "aGk="})


def test_sessions_belong_to_their_endpoint(own: Fleet) -> None:
    """An id of one endpoint is refused by the other, although they share keys and journal."""
    client = own.client()
    session = open_session(client, TEXT, {"requestType": "NEW_SESSION"})

    with pytest.raises(ClientError) as refused:
        ask(client, PACKAGED, session, "What color is the circle?")

    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400


def test_openai_client_reaches_models_by_their_names(own: Fleet, gpt: openai.OpenAI) -> None:
    """One base URL serves the models by name, with images, streams, text and a list; llava is not served here."""
    see = [{"type": "image_url", "image_url": {"url": data_url(draw("circle", "red"))}}]
    seeing: Any = [{"role": "user", "content": [*see, {"type": "text", "text": "What color is the circle?"}]}]
    asking: Any = [{"role": "user", "content": "What is the capital of France?"}]

    models = [model.id for model in gpt.models.list()]
    stream = gpt.chat.completions.create(model=PACKAGED, messages=seeing, stream=True)
    seen = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    answer = gpt.chat.completions.create(model=TEXT, messages=asking, max_tokens=40)
    with pytest.raises(openai.NotFoundError) as unknown:
        gpt.chat.completions.create(model="llava", messages=asking)
    with pytest.raises(openai.BadRequestError, match="text only"):
        gpt.chat.completions.create(model=TEXT, messages=seeing)

    assert sorted(models) == sorted([PACKAGED, TEXT, OLD])
    assert seen == "The circle is red."
    assert (answer.model, answer.choices[0].message.content) == (TEXT, "The capital of France is Paris.")
    assert unknown.value.code == "model_not_found"
    assert f"There is: {', '.join(f'`{name}`' for name in models)}." in unknown.value.message


def test_older_lmi_streams_one_object_without_being_asked(own: Fleet) -> None:
    """With LMI 0.25's output_formatter=json, a client that sends no `stream` can print the text as it comes."""
    body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 16}}

    answer = own.client().invoke_endpoint_with_response_stream(
        EndpointName=TEXT, ContentType="application/json", Body=json.dumps(body)
    )
    pieces = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]

    assert answer["ContentType"] == "application/json"
    assert pieces[0].startswith(b'{"generated_text": "')
    assert len(pieces) > 10
    assert "Paris" in json.loads(b"".join(pieces))["generated_text"]


def test_requests_beyond_the_capacity_wait_for_the_instance(own: Fleet) -> None:
    """Requests beyond the capacity wait and are all answered, as the command line configures."""
    body = json.dumps({"inputs": "What color is the circle?", "parameters": {"max_new_tokens": 8}})
    together = Barrier(6)

    def ask_once(client: Any) -> Any:
        together.wait(60)
        answer = client.invoke_endpoint(EndpointName=PACKAGED, ContentType="application/json", Body=body)
        [generated] = json.loads(answer["Body"].read())
        return generated["generated_text"]

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask_once, [own.client() for _ in range(6)]))

    assert len(answers) == 6
    assert answers[0]
    assert set(answers) == {answers[0]}
    assert {instance["capacity"] for instance in own.instances()} == {1}
    numbers = requests.get(f"{own.admin}/metrics", timeout=30).text
    [waited] = re.findall(r'^QueueLatency_count\{endpoint="packaged".*\} (.+)$', numbers, re.MULTILINE)
    assert float(waited) >= 1


def test_the_command_line_talks_to_a_text_model(own: Fleet) -> None:
    """`torchmoor chat` works without an image."""
    command = [str(TORCHMOOR), "chat", "--endpoint", TEXT]
    question = ("--ask", "What is the capital of France?")

    result = subprocess.run([*command, "--url", own.runtime, *question], capture_output=True, text=True, timeout=120)

    assert result.returncode == 0, result.stderr
    assert result.stdout == "The capital of France is Paris.\n"
