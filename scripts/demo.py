"""Demonstrate the main use case: start `torchmoor up` with two instances, and hold conversations about images.

The script sends all requests with boto3 and checks all answers. The last line of standard output is one line of JSON;
the exit status is 1 if anything was wrong.

    python scripts/demo.py [--port 8080]
"""

import argparse
import base64
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "models" / "tiny-llava" / "samples"
ENDPOINT = "llava"
NUM_INSTANCES = 2
QUESTIONS_PER_IMAGE = 3


class Conversation:
    """A session about one image. open_ms: duration of its opening."""

    def __init__(self, client: Any, path: Path) -> None:
        self._client = client
        image = base64.b64encode(path.read_bytes()).decode()
        began = time.monotonic()
        answer = client.invoke_endpoint(
            EndpointName=ENDPOINT,
            SessionId="NEW_SESSION",
            ContentType="application/json",
            Body=json.dumps({"type": "start_session", "image": image}),
        )
        self.open_ms = (time.monotonic() - began) * 1000
        self.id = answer["NewSessionId"].partition(";")[0]
        say(f"\n{path.name} ({len(image)} bytes) opened session {self.id[:24]}... on {self.instance}")

    @property
    def instance(self) -> str:
        """The instance that the session id names."""
        return self.id.removeprefix("ts-seq-").split("-", 2)[2].rpartition("-")[0]

    def ask(self, question: str) -> tuple[str, float]:
        """Return the answer, and the milliseconds to its first token from the receipt."""
        body = json.dumps({"type": "send_text_prompt", "prompt_text": question})
        answer = self._client.invoke_endpoint(
            EndpointName=ENDPOINT, SessionId=self.id, ContentType="application/json", Body=body
        )
        text: str = json.load(answer["Body"])["response_text"]
        receipt = answer["ResponseMetadata"]["HTTPHeaders"]
        tokens = f"{receipt['x-torchmoor-prefill-tokens']} of {receipt['x-torchmoor-context-tokens']} tokens computed"
        say(f"  {question}  ->  {text}   [{receipt['x-torchmoor-instance']}, {body_size(body)} sent, {tokens}]")
        return text, float(receipt["x-torchmoor-ttft-ms"])

    def stream(self, question: str) -> tuple[str, float]:
        """Print the answer as it arrives; return it, and the milliseconds to its first byte."""
        began, first_ms, text = time.monotonic(), 0.0, ""
        answer = self._client.invoke_endpoint_with_response_stream(
            EndpointName=ENDPOINT,
            SessionId=self.id,
            ContentType="application/json",
            Body=json.dumps({"type": "send_text_prompt", "prompt_text": question, "stream": True}),
        )
        print(f"  {question}  ->  ", end="", file=sys.stderr, flush=True)
        for event in answer["Body"]:
            piece = event["PayloadPart"]["Bytes"].decode()
            first_ms = first_ms or (time.monotonic() - began) * 1000
            text += piece
            print(piece, end="", file=sys.stderr, flush=True)
        say("   [streamed]")
        return text, first_ms

    def close(self) -> bool:
        answer = self._client.invoke_endpoint(
            EndpointName=ENDPOINT,
            SessionId=self.id,
            ContentType="application/json",
            Body=json.dumps({"type": "close_session"}),
        )
        return bool(answer["ClosedSessionId"] == self.id)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def body_size(body: str) -> str:
    return f"{len(body.encode())} bytes"


def pick_questions() -> dict[str, list[dict[str, str]]]:
    """Return two sample images, each with a few questions and their right answers."""
    by_image: dict[str, list[dict[str, str]]] = {}
    for item in json.loads((SAMPLES / "questions.json").read_text()):
        by_image.setdefault(item["image"], []).append(item)
    return {image: items[:QUESTIONS_PER_IMAGE] for image, items in list(by_image.items())[:2]}


def converse(runtime: str) -> dict[str, Any]:
    """Hold the conversations; return the contents of the last line."""
    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=runtime,
        region_name="us-east-1",
        aws_access_key_id="local",
        aws_secret_access_key="local",
        config=Config(read_timeout=60, proxies={}),  # a proxy of the environment cannot reach this machine
    )
    questions = pick_questions()
    chats = {image: Conversation(client, SAMPLES / image) for image in questions}
    ok, answers, times = True, [], []
    say("")
    for turn in range(QUESTIONS_PER_IMAGE):  # in turn, so that mixed-up sessions would show
        for image, items in questions.items():
            if turn < len(items):
                text, first_token_ms = chats[image].ask(items[turn]["question"])
                answers.append(text)
                times.append((turn, first_token_ms))
                ok = ok and text == items[turn]["answer"]
    first = next(iter(chats.values()))
    text, first_byte_ms = first.stream("Describe the image.")
    answers.append(text)
    are_closed = [chat.close() for chat in chats.values()]
    ok = ok and bool(text) and all(are_closed)
    follow_ups = sorted(ms for turn, ms in times if turn > 0)
    return {
        "ok": ok,
        "answers": answers,
        "ttft_ms": {
            "open": round(first.open_ms, 1),
            "first_question": round(times[0][1], 1),
            "follow_up": round(follow_ups[len(follow_ups) // 2], 1),
            "streamed_first_byte": round(first_byte_ms, 1),
        },
        "instances": len({chat.instance for chat in chats.values()}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", default="0", help="port of the runtime API (default: any free one)")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # stops the instances, as Ctrl-C does
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    up = subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("torchmoor")), "up", "--instances", str(NUM_INSTANCES)),
            *("--port", options.port, "--admin-port", "0", "--model-store", str(ROOT / "model_store")),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert up.stdout is not None
    result: dict[str, Any] = {"ok": False}
    try:
        line = up.stdout.readline()
        if not line:
            result["error"] = "the fleet did not start; its output is above"
        else:
            result = converse(json.loads(line)["runtime"])
    except (BotoCoreError, ClientError) as error:
        result["error"] = str(error)
    except KeyboardInterrupt:
        result["error"] = "interrupted"
    finally:
        up.send_signal(signal.SIGINT)
        try:
            status = up.wait(timeout=60)
        finally:
            up.kill()
    result["ok"] = result["ok"] and status == 0
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
