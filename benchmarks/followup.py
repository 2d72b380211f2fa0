"""What is a kept cache worth to a follow-up question?

Three ways to ask the second question of a conversation about a picture, each through boto3, the proxy and real
TorchServe, on a LLaVA of real shape with random weights:

    stateless   open with the picture again and send the whole conversation
    features    the session holds the picture's projected features, the text is computed again
    kv          the session holds the KV cache, only the question's own tokens are computed

Time to first token, medians of interleaved rounds. By operation counts the KV arm should be bounded by one pass over
the weights; prototypes saw 24 times less than stateless.

    python benchmarks/followup.py [--quick] [--rounds 5]
"""

import argparse
import base64
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import boto3
import torch
from botocore.config import Config
from PIL import Image
from report import median, print_report
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2Config,
)

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "models" / "tiny-llava"  # only its words; the shapes below are what costs time
NEW_TOKENS = 16
NUM_TURNS = 20


def build_checkpoint(folder: Path, *, quick: bool) -> int:
    """Write a LLaVA with random weights; returns its number of parameters.

    The full shape is CLIP-L/14-336 (576 image tokens) and Qwen2-0.5B, the quick one has a fifth of the layers.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=5 if quick else 24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    )
    text = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=5 if quick else 24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=576,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    size = {"height": 336, "width": 336}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=(TOKENIZER / "chat_template.jinja").read_text(),
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


class Client:
    """boto3 with a clock."""

    def __init__(self, runtime: str) -> None:
        self._client = boto3.client(
            "sagemaker-runtime",
            endpoint_url=runtime,
            region_name="us-east-1",
            aws_access_key_id="x",
            aws_secret_access_key="x",
            config=Config(read_timeout=600),
        )

    def open(self, image: str) -> tuple[str, float]:
        """A session's id and the milliseconds that opening took."""
        began = time.perf_counter()
        opened = self._invoke("NEW_SESSION", {"type": "start_session", "image": image})
        return opened["NewSessionId"].partition(";")[0], (time.perf_counter() - began) * 1000

    def ask(self, session: str, question: str) -> tuple[float, str, int]:
        """Milliseconds to the first byte of the streamed answer, the answer, and the tokens computed before it."""
        parameters = {"max_new_tokens": NEW_TOKENS}
        body = {"type": "send_text_prompt", "prompt_text": question, "stream": True, "parameters": parameters}
        began = time.perf_counter()
        answer = self._client.invoke_endpoint_with_response_stream(
            EndpointName="llava",
            SessionId=session,
            ContentType="application/json",
            Accept="text/event-stream",
            Body=json.dumps(body),
        )
        parts, first_ms = [], 0.0
        for event in answer["Body"]:
            first_ms = first_ms or (time.perf_counter() - began) * 1000
            parts.append(event["PayloadPart"]["Bytes"])
        events = b"".join(parts).decode().split("\n\n")
        text = json.loads(events[-2].removeprefix("data:"))["generated_text"]
        num_prefilled = int(answer["ResponseMetadata"]["HTTPHeaders"]["x-torchmoor-prefill-tokens"])
        return first_ms, text, num_prefilled

    def close(self, session: str) -> None:
        self._invoke(session, {"type": "close_session"})

    def _invoke(self, session: str, body: dict[str, Any]) -> Any:
        return self._client.invoke_endpoint(
            EndpointName="llava", SessionId=session, ContentType="application/json", Body=json.dumps(body)
        )


def question(rng: random.Random) -> str:
    """About twenty tokens that no other question shares."""
    colors, shapes = ("red", "green", "blue", "yellow"), ("circle", "square", "triangle", "star")
    things = " or the ".join(f"{rng.choice(colors)} {rng.choice(shapes)}" for _ in range(4))
    return f"Where is the {things} {rng.randrange(10)}?"


def picture() -> str:
    """A photograph-like JPEG of 1024 x 768, as base64."""
    noise = Image.frombytes("RGB", (128, 96), random.Random(0).randbytes(128 * 96 * 3))
    encoded = io.BytesIO()
    noise.resize((1024, 768), Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=90)
    return base64.b64encode(encoded.getvalue()).decode()


def measure_round(client: Client, image: str, rng: random.Random) -> dict[str, tuple[float, int]]:
    """One round of the three arms: milliseconds to the first token of the second answer, tokens computed before it."""
    first, second = question(rng), question(rng)
    kept, _ = client.open(image)
    _, said, _ = client.ask(kept, first)
    whole = f"{first} {said} {second}"  # as long as the conversation that a stateless client sends
    kv_ms, _, kv_tokens = client.ask(kept, second)
    warm, _ = client.open(image)
    features_ms, _, features_tokens = client.ask(warm, whole)
    stateless, open_ms = client.open(image)
    ask_ms, _, stateless_tokens = client.ask(stateless, whole)
    for session in (kept, warm, stateless):
        client.close(session)
    return {
        "stateless": (open_ms + ask_ms, stateless_tokens),
        "features": (features_ms, features_tokens),
        "kv": (kv_ms, kv_tokens),
    }


def measure_growth(client: Client, image: str, rng: random.Random) -> float:
    """Time to first token of turns 18 to 20 of a conversation by that of turns 2 to 4."""
    session, _ = client.open(image)
    times = [client.ask(session, question(rng))[0] for _ in range(NUM_TURNS)]
    client.close(session)
    return median(times[-3:]) / median(times[1:4])


def run(runtime: str, rounds: int) -> tuple[dict[str, list[tuple[float, int]]], float]:
    client, image, rng = Client(runtime), picture(), random.Random(1)
    measure_round(client, image, rng)  # warm-up
    times: dict[str, list[tuple[float, int]]] = {"stateless": [], "features": [], "kv": []}
    for number in range(rounds):
        for arm, measured in measure_round(client, image, rng).items():
            times[arm].append(measured)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return times, measure_growth(client, image, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the layers")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torchmoor-bench-") as folder:
        num_parameters = build_checkpoint(Path(folder), quick=options.quick)
        up = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("torchmoor")), "up", "--port", "0", "--admin-port", "0"),
                *("--model-store", str(ROOT / "model_store")),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCHMOOR_HANDLER_MODEL_PATH": folder},
        )
        assert up.stdout is not None
        try:
            line = up.stdout.readline()
            if not line:
                raise SystemExit("followup: the instance did not start")
            times, growth = run(json.loads(line)["runtime"], options.rounds)
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(timeout=60)
    medians = {arm: median([ms for ms, _ in values]) for arm, values in times.items()}
    rows = [
        {
            "arm": arm,
            "ttft_ms": medians[arm],
            "least": min(values)[0],
            "most": max(values)[0],
            "tokens": int(median([tokens for _, tokens in values])),
        }
        for arm, values in times.items()
    ]
    ratios = {
        "ttft_kv_vs_stateless": medians["kv"] / medians["stateless"],
        "ttft_features_vs_stateless": medians["features"] / medians["stateless"],
        "ttft_turn20_vs_turn2": growth,
        "rebuild_vs_stateless": None,
        "greedy_equal": None,
    }
    print_report("followup", rows, ratios, quick=options.quick, rounds=options.rounds, parameters=num_parameters)


if __name__ == "__main__":
    main()
