"""SmolLM2-135M-Instruct, real weights, on real TorchServe: a text endpoint beside one that sees pictures."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import openai
import pytest
import requests
from botocore.exceptions import ClientError

from tests.tools import missing
from tests.torchserve.conftest import Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw

pytestmark = pytest.mark.torchserve


@pytest.fixture(scope="module")
def two_endpoints(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run an endpoint with pictures and one without, an instance each with one request at a time and a queue."""
    if not (archives / "llm.mar").is_file():
        missing("there is no llm.mar: make archives downloads SmolLM2 for it")
    folder = tmp_path_factory.mktemp("two-endpoints")
    arguments = ("--endpoint", "llava", "--endpoint", "llm", "--capacity", "1", "--late-binding")
    lmi = {"OPTION_OUTPUT_FORMATTER": "json"}
    with run_fleet(*arguments, run_dir=folder / "run", log=folder / "up.log", environment=lmi) as running:
        yield running


def open_session(client: Any, endpoint: str, body: dict[str, Any]) -> str:
    opened = client.invoke_endpoint(
        EndpointName=endpoint,
        SessionId="NEW_SESSION",
        ContentType="application/json",
        Body=json.dumps(body),
    )
    session: str = opened["NewSessionId"].partition(";")[0]
    return session


def ask(client: Any, endpoint: str, session: str, question: str) -> list[str]:
    """Return the pieces of a streamed answer."""
    body = {"type": "send_text_prompt", "prompt_text": question, "stream": True, "parameters": {"max_new_tokens": 40}}
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName=endpoint, SessionId=session, ContentType="application/json", Body=json.dumps(body)
    )
    return [event["PayloadPart"]["Bytes"].decode() for event in answer["Body"]]


def test_a_text_model_streams_a_right_answer(two_endpoints: Fleet) -> None:
    """Real weights answer a factual question, and the second turn continues from the first."""
    client = two_endpoints.client()
    session = open_session(client, "llm", {"requestType": "NEW_SESSION"})

    pieces = ask(client, "llm", session, "What is the capital of France?")
    followed = ask(client, "llm", session, "And in which country is that city?")

    assert "llm-0" in session
    assert len(pieces) > 1
    assert "".join(pieces) == "The capital of France is Paris."
    assert "France" in "".join(followed)


def test_a_text_model_refuses_a_picture(two_endpoints: Fleet) -> None:
    """A picture is refused with the reason, and no session is opened."""
    with pytest.raises(ClientError, match="text only"):
        open_session(two_endpoints.client(), "llm", {"type": "start_session", "image": "aGk="})


def test_sessions_belong_to_their_endpoint(two_endpoints: Fleet) -> None:
    """An id of one endpoint is refused by the other, although they share keys and journal."""
    client = two_endpoints.client()
    session = open_session(client, "llm", {"requestType": "NEW_SESSION"})

    with pytest.raises(ClientError) as refused:
        ask(client, "llava", session, "What color is the circle?")

    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400


def test_openai_client_reaches_both_models_by_their_names(two_endpoints: Fleet) -> None:
    """One base URL serves both models by name, with pictures, streams, text and a list of models."""
    see = [{"type": "image_url", "image_url": {"url": data_url(draw("circle", "red"))}}]
    seeing: Any = [{"role": "user", "content": [*see, {"type": "text", "text": "What color is the circle?"}]}]
    asking: Any = [{"role": "user", "content": "What is the capital of France?"}]

    with openai.OpenAI(base_url=two_endpoints.runtime + "/v1", api_key="any", timeout=90, max_retries=0) as gpt:
        models = [model.id for model in gpt.models.list()]
        stream = gpt.chat.completions.create(model="llava", messages=seeing, stream=True)
        seen = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        answer = gpt.chat.completions.create(model="llm", messages=asking, max_tokens=40)
        with pytest.raises(openai.NotFoundError, match=r"There is: `llava`, `llm`\.") as unknown:
            gpt.chat.completions.create(model="gpt-5", messages=asking)
        with pytest.raises(openai.BadRequestError, match="text only"):
            gpt.chat.completions.create(model="llm", messages=seeing)

    assert models == ["llava", "llm"]
    assert seen == "The circle is red."
    assert (answer.model, answer.choices[0].message.content) == ("llm", "The capital of France is Paris.")
    assert unknown.value.code == "model_not_found"


def test_older_lmi_streams_one_object_without_being_asked(two_endpoints: Fleet) -> None:
    """With LMI 0.25's output_formatter=json, a client that sends no `stream` can print the text as it comes."""
    body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 40}}

    answer = two_endpoints.client().invoke_endpoint_with_response_stream(
        EndpointName="llm", ContentType="application/json", Body=json.dumps(body)
    )
    pieces = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]

    assert answer["ContentType"] == "application/json"
    assert pieces[0].startswith(b'{"generated_text": "')
    assert len(pieces) > 10
    assert "Paris" in json.loads(b"".join(pieces))["generated_text"]


def test_requests_beyond_the_capacity_wait_for_the_instance(two_endpoints: Fleet) -> None:
    """Requests beyond the capacity wait and are all answered, as the command line configures."""
    body = json.dumps({"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}})
    together = Barrier(6)

    def ask_once(client: Any) -> Any:
        together.wait(60)
        answer = client.invoke_endpoint(EndpointName="llm", ContentType="application/json", Body=body)
        return json.loads(answer["Body"].read())["generated_text"]

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask_once, [two_endpoints.client() for _ in range(6)]))

    assert len(answers) == 6
    assert all("Paris" in answer for answer in answers)
    assert {instance["capacity"] for instance in two_endpoints.instances()} == {1}
    numbers = requests.get(f"{two_endpoints.admin}/metrics", timeout=30).text
    [waited] = re.findall(r'^QueueLatency_count\{endpoint="llm".*\} (.+)$', numbers, re.MULTILINE)
    assert float(waited) >= 1


def test_the_command_line_talks_to_a_text_model(two_endpoints: Fleet) -> None:
    """`torchmoor chat` works without a picture."""
    command = [str(Path(sys.executable).with_name("torchmoor")), "chat", "--endpoint", "llm"]
    question = ("--ask", "What is the capital of France?")

    result = subprocess.run(
        [*command, "--url", two_endpoints.runtime, *question], capture_output=True, text=True, timeout=120
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout == "The capital of France is Paris.\n"
