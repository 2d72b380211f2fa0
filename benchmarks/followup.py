"""Measures how much a kept cache shortens the time to the first token of a follow-up question.

A client asks the second question of a conversation about an image. The model is a LLaVA of real shape with random
weights, float32 on one thread, behind boto3, the proxy and real TorchServe:

    stateless   one request contains the image and the whole conversation
    features    the worker still has the image's projected features; the text is computed again
    kv          the session has its KV cache; only the tokens of the question are computed
    responses   the same over OpenAI's Responses API, with previous_response_id
    rebuild     another instance answers, which rebuilds the session from its journal
    stored kv   the same, and the journal has the session's KV cache
    pixels      a handler like that of the AWS sample, which keeps pixel values and computes vision tower and prompt
                again; compared with a stateless handler, both in this process

Reports the median of rounds in which all arms take turns; each round has its own image. The KV arm takes at least one
pass over the weights; in prototypes it took 1/24 of stateless. Also measures how many sessions of the demo model one
device keeps with a budget for a fraction of them, and compares a session's memory with its formula.

    make bench NAME=followup [QUICK=1]
    python -m benchmarks.followup [--quick] [--rounds 5] [--save]
"""

import io
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from PIL import Image, ImageDraw

from benchmarks.fleet import Fleet, running_fleet
from benchmarks.followup_arms import (
    NEW_TOKENS,
    Answer,
    Client,
    InstanceClient,
    PixelCache,
    ResponsesClient,
    next_question,
    whole_conversation,
)
from benchmarks.followup_checkpoint import FEATURE_BYTES, build_checkpoint, kv_token_bytes
from benchmarks.report import ROOT, parse_options, print_report

NUM_TURNS = 20
PART_TOKENS = 64  # of each part of a KV cache in the journal
WRITE_TIMEOUT_S = 60.0  # for a KV cache to be in the journal
COLORS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle", "star")
KEPT_KV_TOKENS = 1600  # room for about 25 sessions of the demo model
KEPT_FEATURE_BYTES = 32 * 36 * 192 * 4  # room for 32 images of the demo model: 36 tokens of width 192 each


def question(rng: random.Random) -> str:
    """Return a random question of about twenty tokens."""
    things = " or the ".join(f"{rng.choice(COLORS)} {rng.choice(SHAPES)}" for _ in range(4))
    return f"Where is the {things} {rng.randrange(10)}?"


def photograph(rng: random.Random) -> bytes:
    """Return a JPEG of 1024 x 768 with the detail of a photo."""
    noise = Image.frombytes("RGB", (128, 96), rng.randbytes(128 * 96 * 3))
    encoded = io.BytesIO()
    noise.resize((1024, 768), Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=90)
    return encoded.getvalue()


def drawing(rng: random.Random) -> bytes:
    """Return a PNG for the demo model: one shape at a random position."""
    canvas = Image.new("RGB", (96, 96), (rng.randrange(200, 256),) * 3)
    x, y = rng.randrange(5, 40), rng.randrange(5, 40)
    draw = ImageDraw.Draw(canvas)
    (draw.ellipse if rng.random() < 0.5 else draw.rectangle)((x, y, x + 45, y + 45), fill=rng.choice(COLORS))
    encoded = io.BytesIO()
    canvas.save(encoded, "PNG")
    return encoded.getvalue()


class Rounds:
    """Runs the arms, collects their figures by round, and compares their answers."""

    def __init__(self, fleet: Fleet, storing: Fleet, pixels: PixelCache) -> None:
        self._fleet = fleet
        self._storing = storing
        self._client = Client(fleet.runtime)
        self._responses = ResponsesClient(fleet.runtime)
        self._pixels = pixels
        self._rng = random.Random(1)
        self.times_ms: dict[str, list[float]] = defaultdict(list)
        self.prefilled: dict[str, list[int]] = defaultdict(list)
        self.is_equal = True

    def warm_up(self) -> None:
        self.run_round()
        self.times_ms.clear()
        self.prefilled.clear()

    def run_round(self) -> None:
        """Run every arm once, all with the same conversation about a new image."""
        client, image = self._client, photograph(self._rng)
        first, second = question(self._rng), question(self._rng)
        session = client.open(image)
        texts = [first, client.ask(session, first).text, second]
        answers = {"kv": client.ask(session, second)}
        client.close(session)
        answers["responses"] = self._responses.ask(image, first, second)
        answers["stateless"] = client.ask_stateless(image, texts)
        answers["features"] = self._with_features(image, texts)
        answers["rebuild"] = self._rebuild(self._fleet, image, first, second)
        answers["stored kv"] = self._rebuild(self._storing, image, first, second)
        for arm, answer in answers.items():
            self._note(arm, answer)
        if len({(answer.text, answer.num_context) for answer in answers.values()}) != 1:
            print(f"the arms answered differently: {answers}", file=sys.stderr)
            self.is_equal = False
        kept_ms, stateless_ms = self._pixels.measure(image, texts)
        self.times_ms["pixels, in process"].append(kept_ms)
        self.times_ms["stateless, in process"].append(stateless_ms)

    def _with_features(self, image: bytes, texts: list[str]) -> Answer:
        """Send the whole conversation while another session of the same caller has the image."""
        home, caller = self._fleet.instances()[0], self._new_caller()
        session = caller.open(home, image)
        answer = caller.ask(home, whole_conversation(image, texts))
        caller.close(home, session)
        return answer

    def _rebuild(self, fleet: Fleet, image: bytes, first: str, second: str) -> Answer:
        """Send the second question to another instance than the first, and return its answer."""
        (home, other), caller = fleet.instances(), self._new_caller()
        before = fleet.status(home)["stored_kv"]["written"]
        session = caller.open(home, image)
        num_tokens = caller.ask(home, next_question(first), session).num_context + NEW_TOKENS - 1
        if fleet is self._storing:
            until = time.monotonic() + WRITE_TIMEOUT_S
            while fleet.status(home)["stored_kv"]["written"] < before + num_tokens // PART_TOKENS:
                if time.monotonic() > until:
                    raise RuntimeError("the KV cache was not written")
                time.sleep(0.05)
        answer = caller.ask(other, next_question(second), session)
        if not answer.is_rebuilt:
            raise RuntimeError(f"{other['name']} had the session in memory")
        caller.close(home, session)
        return answer

    def _new_caller(self) -> InstanceClient:
        return InstanceClient(f"{self._rng.getrandbits(64):016x}")

    def _note(self, arm: str, answer: Answer) -> None:
        if (arm in ("kv", "responses", "stored kv")) != (answer.num_prefilled < answer.num_context):
            raise RuntimeError(f"the {arm} arm computed {answer.num_prefilled} of {answer.num_context} tokens")
        self.times_ms[arm].append(answer.first_ms)
        self.prefilled[arm].append(answer.num_prefilled)

    def measure_growth(self) -> float:
        """Return the time to first token of turns 18 to 20 of a conversation, relative to turns 2 to 4."""
        session = self._client.open(photograph(self._rng))
        times = [self._client.ask(session, question(self._rng)).first_ms for _ in range(NUM_TURNS)]
        self._client.close(session)
        return median(times[-3:]) / median(times[1:4])

    def measure_memory(self, *, quick: bool) -> dict[str, float]:
        """Return the bytes of a session of one turn in each tier, relative to the formulas."""
        image = photograph(self._rng)
        before = {i["name"]: self._fleet.status(i)["memory"] for i in self._fleet.instances()}
        session = self._client.open(image)
        answer = self._client.ask(session, question(self._rng))
        home = next(i for i in self._fleet.instances() if i["name"] == answer.instance)
        after = self._fleet.status(home)["memory"]
        self._client.close(session)
        held = {
            tier: after[f"{tier}_bytes"] - before[home["name"]][f"{tier}_bytes"] for tier in ("kv", "features", "host")
        }
        num_tokens = answer.num_context + NEW_TOKENS - 1  # the last new token is not in the cache
        return {
            "kv_bytes_vs_formula": held["kv"] / (num_tokens * kv_token_bytes(quick=quick)),
            "features_bytes_vs_formula": held["features"] / FEATURE_BYTES,
            "host_bytes_vs_formula": held["host"] / len(image),
        }


def measure_sessions(count: int) -> dict[str, int]:
    """Open sessions on a device with room for the KV caches of about 25, and ask each of them again at the end.

    lost: sessions that did not answer; wrong: answers that differ from those to the same conversation in one request.
    """
    rng = random.Random(2)
    settings = {"SESSION_KV_TOKENS": str(KEPT_KV_TOKENS), "SESSION_FEATURES_BYTES": str(KEPT_FEATURE_BYTES)}
    with running_fleet(ROOT / "models" / "tiny-llava", **settings) as fleet:
        client = Client(fleet.runtime)
        images = [drawing(rng) for _ in range(count)]
        sessions = [client.open(image) for image in images]
        first, second = "What color is the shape?", "What shape is it?"
        first_answers = [client.ask(session, first).text for session in sessions]
        (instance,) = fleet.instances()
        status = fleet.status(instance)
        lost = wrong = 0
        for i in rng.sample(range(count), count):
            try:
                answer = client.ask(sessions[i], second).text
            except Exception as error:
                print(f"session {i} is lost: {error}", file=sys.stderr)
                lost += 1
                continue
            if i % 4 == 0:
                wrong += answer != client.ask_stateless(images[i], [first, first_answers[i], second]).text
    memory = status["memory"]
    return {
        "open": status["sessions"]["open"],
        "lost": lost,
        "wrong": wrong,
        "kv_bytes": memory["kv_bytes"],
        "kv_capacity_bytes": memory["kv_capacity_bytes"],
        "features_bytes": memory["features_bytes"],
        "features_capacity_bytes": memory["features_capacity_bytes"],
    }


def main() -> None:
    options = parse_options(__doc__, quick="a fifth of the layers, and fewer sessions")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="torchmoor-bench-") as folder:
        checkpoint = Path(folder)
        num_parameters = build_checkpoint(checkpoint, quick=options.quick)
        pixels = PixelCache(checkpoint)
        storing = {"JOURNAL_MAX_KV_BYTES": str(1 << 34), "JOURNAL_KV_IDLE_S": "0"}
        with (
            running_fleet(checkpoint, num_instances=2, MODEL_DTYPE="float32") as fleet,
            running_fleet(checkpoint, num_instances=2, MODEL_DTYPE="float32", **storing) as storing_fleet,
        ):
            rounds = Rounds(fleet, storing_fleet, pixels)
            rounds.warm_up()
            for number in range(options.rounds):
                rounds.run_round()
                print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
            growth = rounds.measure_growth()
            memory = rounds.measure_memory(quick=options.quick)
    sessions = measure_sessions(100 if options.quick else 200)
    times: dict[str, list[float]] = rounds.times_ms
    rows: list[dict[str, Any]] = [
        {
            "arm": arm,
            "ttft_ms": median(times[arm]),
            "least": min(times[arm]),
            "most": max(times[arm]),
            "tokens": int(median(rounds.prefilled[arm])) if arm in rounds.prefilled else None,
        }
        for arm in times
    ]

    def ratio(arm: str, base: str = "stateless") -> float:
        return median([a / b for a, b in zip(times[arm], times[base], strict=True)])

    ratios = {
        "ttft_kv_vs_stateless": ratio("kv"),
        "ttft_responses_vs_stateless": ratio("responses"),
        "ttft_features_vs_stateless": ratio("features"),
        "ttft_pixels_vs_stateless": ratio("pixels, in process", "stateless, in process"),
        "ttft_turn20_vs_turn2": growth,
        "rebuild_vs_stateless": ratio("rebuild"),
        "rebuild_stored_vs_stateless": ratio("stored kv"),
        "greedy_equal": rounds.is_equal,
        "sessions_vs_one_a_worker": sessions["open"],
        "sessions_lost": sessions["lost"],
        "sessions_wrong": sessions["wrong"],
        **memory,
    }
    print_report(
        "followup",
        rows,
        ratios,
        options,
        parameters=num_parameters,
        sessions=sessions,
    )


if __name__ == "__main__":
    main()
