"""A user's own checkpoints under their own names: as directories, in S3, and as an archive of `torchmoor package`."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.servers import S3Server
from tests.torchserve.conftest import ROOT, Fleet, run_fleet
from tests.torchserve.drawings import draw
from tests.unit.handlers.tiny_checkpoints import PLAIN, save
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.s3]

DEMO = ROOT / "models" / "tiny-llava"
BUCKET = "own-models"
SEEING = ["packaged", "my-llava"]
OLD = "old"  # a GPT-2 in S3, which does not run in packed steps
SHORT = 80  # tokens


@pytest.fixture(scope="module")
def own(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run a renamed archive, a checkpoint with a serving.properties of its own, and one in S3."""
    folder = tmp_path_factory.mktemp("own-models")
    mine = folder / "my-llava"
    shutil.copytree(DEMO, mine)
    (mine / "serving.properties").write_text(f"option.max_model_len={SHORT}\n")
    save(PLAIN["gpt2"](), folder / "tiny-gpt2", DEMO)
    client = s3_server.client()
    client.create_bucket(Bucket=BUCKET)
    for path in (folder / "tiny-gpt2").iterdir():
        client.upload_file(str(path), BUCKET, f"tiny/{path.name}")
    client.close()
    (folder / "store").mkdir()
    command = [str(Path(sys.executable).with_name("torchmoor")), "package", str(DEMO)]
    subprocess.run([*command, "-o", str(folder / "store" / "demo.mar")], check=True, timeout=60)
    (folder / "store" / "demo.mar").rename(folder / "store" / "packaged.mar")
    with run_fleet(
        *(str(mine), "--name", "my-llava", f"s3://{BUCKET}/tiny", "--name", OLD),
        *("--model-store", str(folder / "store"), "--endpoint", "packaged"),
        run_dir=folder / "run",
        log=folder / "up.log",
        environment={**s3_server.environment, "TORCHMOOR_HANDLER_MODEL_CACHE_DIR": str(folder / "cache")},
    ) as fleet:
        yield fleet


@pytest.mark.parametrize("name", SEEING)
def test_a_model_answers_boto3_under_its_name(own: Fleet, name: str) -> None:
    """A session with a picture, and a question about it."""
    client = own.client()
    opened = client.invoke_endpoint(
        EndpointName=name, SessionId="NEW_SESSION", ContentType="image/png", Body=draw("circle", "red")
    )
    session = opened["NewSessionId"].partition(";")[0]

    answer = client.invoke_endpoint(
        EndpointName=name,
        SessionId=session,
        ContentType="application/json",
        Body=json.dumps({"type": "send_text_prompt", "prompt_text": "What color is the circle?"}),
    )

    assert f"{name}-0" in session
    assert json.load(answer["Body"]) == {"response_text": "The circle is red."}


def test_models_are_listed_and_answered_by_their_names(own: Fleet) -> None:
    """OpenAI's client sees the endpoints; llava, which nothing names, is not served."""
    with openai.OpenAI(base_url=own.runtime + "/v1", api_key="any", timeout=90, max_retries=0) as client:
        assert sorted(model.id for model in client.models.list()) == sorted([*SEEING, OLD])
        answer = client.chat.completions.create(
            model="packaged", messages=[{"role": "user", "content": "What color is the circle?"}], max_tokens=20
        )
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="llava", messages=[{"role": "user", "content": "Hello"}])

    assert answer.choices[0].message.content


def test_models_report_whether_they_read_pictures(own: Fleet) -> None:
    """The chat page learns it of every endpoint."""
    wanted = {"packaged": {"can_see": True}, "my-llava": {"can_see": True}, OLD: {"can_see": False}}

    def capabilities() -> Any:
        return requests.get(f"{own.runtime}/chat/endpoints", timeout=10).json()["capabilities"]

    wait_until(lambda: capabilities() == wanted, "each endpoint has reported its capabilities")


def test_a_models_own_settings_are_its_own(own: Fleet) -> None:
    """serving.properties beside one checkpoint limits its context; the same question fits the other."""
    question = "What color is the circle? " * 12
    with openai.OpenAI(base_url=own.runtime + "/v1", api_key="any", timeout=90, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match=f"at most {SHORT - 1}"):
            client.chat.completions.create(
                model="my-llava", messages=[{"role": "user", "content": question}], max_tokens=8
            )
        answer = client.chat.completions.create(
            model="packaged", messages=[{"role": "user", "content": question}], max_tokens=8
        )

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
