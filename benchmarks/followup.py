"""What is a kept cache worth to a follow-up question?

The second question of a conversation about a picture, asked of a LLaVA of real shape with random weights through
boto3, the proxy and real TorchServe, float32 on one thread:

    stateless   the picture and the whole conversation again, in one request
    features    the session holds the picture's projected features, the text is computed again
    kv          the session holds the KV cache, only the question's own tokens are computed
    responses   the same over OpenAI's Responses API, by previous_response_id
    rebuild     the question reaches another instance, which rebuilds the session from its journal
    stored kv   the same, where the journal has the session's KV cache
    pixels      as in the AWS sample: pixel values are kept, vision tower and prompt computed again (in this process,
                beside a stateless one in this process)

Time to first token, medians of interleaved rounds, each with a picture of its own. By operation counts the KV arm is
bounded by one pass over the weights; prototypes saw 24 times less than stateless. Then how many sessions one device
keeps under a budget that holds a fraction of them, on the demo model, and what a session's memory is by formula.

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
from benchmarks.followup_checkpoint import FEATURE_BYTES, build_checkpoint, kv_bytes_a_token
from benchmarks.report import ROOT, median, parse_options, print_report

NUM_TURNS = 20
PART_TOKENS = 64  # of a KV cache in the journal
WRITTEN_S = 60.0  # to wait for a cache to be written
COLORS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle", "star")
KEPT_KV_TOKENS = 1600  # of the demo model: about 25 of its sessions
KEPT_FEATURE_BYTES = 32 * 36 * 192 * 4  # of 32 pictures of the demo model, 36 tokens of width 192


def question(rng: random.Random) -> str:
    """About twenty tokens that no other question shares."""
    things = " or the ".join(f"{rng.choice(COLORS)} {rng.choice(SHAPES)}" for _ in range(4))
    return f"Where is the {things} {rng.randrange(10)}?"


def photograph(rng: random.Random) -> bytes:
    """Return a JPEG of 1024 x 768 with as much detail as one from a camera."""
    noise = Image.frombytes("RGB", (128, 96), rng.randbytes(128 * 96 * 3))
    encoded = io.BytesIO()
    noise.resize((1024, 768), Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=90)
    return encoded.getvalue()


def drawing(rng: random.Random) -> bytes:
    """Return a PNG for the demo model: one shape somewhere on a background."""
    canvas = Image.new("RGB", (96, 96), (rng.randrange(200, 256),) * 3)
    x, y = rng.randrange(5, 40), rng.randrange(5, 40)
    draw = ImageDraw.Draw(canvas)
    (draw.ellipse if rng.random() < 0.5 else draw.rectangle)((x, y, x + 45, y + 45), fill=rng.choice(COLORS))
    encoded = io.BytesIO()
    canvas.save(encoded, "PNG")
    return encoded.getvalue()


class Rounds:
    """The arms' figures by round, and whether all arms gave the same answer."""

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
        """Every arm once, asking the same conversation, about a picture that no other round has."""
        client, picture = self._client, photograph(self._rng)
        first, second = question(self._rng), question(self._rng)
        session = client.open(picture)
        said = client.ask(session, first).text
        answers = {"kv": client.ask(session, second)}
        client.close(session)
        answers["responses"] = self._responses.ask(picture, first, second)
        answers["stateless"] = client.ask_stateless(picture, [first, said, second])
        answers["features"] = self._with_features(picture, [first, said, second])
        answers["rebuild"] = self._rebuild(self._fleet, picture, first, second)
        answers["stored kv"] = self._rebuild(self._storing, picture, first, second)
        for arm, answer in answers.items():
            self._note(arm, answer)
        if len({(answer.text, answer.num_context) for answer in answers.values()}) != 1:
            print(f"the arms answered differently: {answers}", file=sys.stderr)
            self.is_equal = False
        kept_ms, none_ms = self._pixels.measure(picture, [first, said, second])
        self.times_ms["pixels, in process"].append(kept_ms)
        self.times_ms["stateless, in process"].append(none_ms)

    def _with_features(self, picture: bytes, said: list[str]) -> Answer:
        """The whole conversation again, where a session of the same caller holds the picture."""
        home, caller = self._fleet.instances()[0], self._newcomer()
        session = caller.open(home, picture)
        answer = caller.ask(home, whole_conversation(picture, said))
        caller.close(home, session)
        return answer

    def _rebuild(self, fleet: Fleet, picture: bytes, first: str, second: str) -> Answer:
        """Return the second question, to another instance than the one where the session was opened."""
        (home, other), caller = fleet.instances(), self._newcomer()
        before = fleet.status(home)["stored_kv"]["written"]
        session = caller.open(home, picture)
        num_tokens = caller.ask(home, next_question(first), session).num_context + NEW_TOKENS - 1
        if fleet is self._storing:
            until = time.monotonic() + WRITTEN_S
            while fleet.status(home)["stored_kv"]["written"] < before + num_tokens // PART_TOKENS:
                if time.monotonic() > until:
                    raise RuntimeError("the KV cache was not written")
                time.sleep(0.05)
        answer = caller.ask(other, next_question(second), session)
        if not answer.is_rebuilt:
            raise RuntimeError(f"{other['name']} had the session already")
        caller.close(home, session)
        return answer

    def _newcomer(self) -> InstanceClient:
        return InstanceClient(f"{self._rng.getrandbits(64):016x}")

    def _note(self, arm: str, answer: Answer) -> None:
        if (arm in ("kv", "responses", "stored kv")) != (answer.num_prefilled < answer.num_context):
            raise RuntimeError(f"the {arm} arm computed {answer.num_prefilled} of {answer.num_context} tokens")
        self.times_ms[arm].append(answer.first_ms)
        self.prefilled[arm].append(answer.num_prefilled)

    def measure_growth(self) -> float:
        """Time to first token of turns 18 to 20 of a conversation by that of turns 2 to 4."""
        session = self._client.open(photograph(self._rng))
        times = [self._client.ask(session, question(self._rng)).first_ms for _ in range(NUM_TURNS)]
        self._client.close(session)
        return median(times[-3:]) / median(times[1:4])

    def measure_memory(self, *, quick: bool) -> dict[str, float]:
        """What a session of one turn holds at each tier by what the formulas say."""
        picture = photograph(self._rng)
        before = {i["name"]: self._fleet.status(i)["memory"] for i in self._fleet.instances()}
        session = self._client.open(picture)
        answer = self._client.ask(session, question(self._rng))
        home = next(i for i in self._fleet.instances() if i["name"] == answer.instance)
        after = self._fleet.status(home)["memory"]
        self._client.close(session)
        held = {
            tier: after[f"{tier}_bytes"] - before[home["name"]][f"{tier}_bytes"] for tier in ("kv", "features", "host")
        }
        num_tokens = answer.num_context + NEW_TOKENS - 1  # the last new token is never stored
        return {
            "kv_bytes_vs_formula": held["kv"] / (num_tokens * kv_bytes_a_token(quick=quick)),
            "features_bytes_vs_formula": held["features"] / FEATURE_BYTES,
            "host_bytes_vs_formula": held["host"] / len(picture),
        }


def measure_sessions(count: int) -> dict[str, int]:
    """Open sessions on one device whose budget holds KV caches of about 25 of them, all asked again at the end.

    lost: not answered; wrong: answered otherwise than the same conversation sent at once.
    """
    rng = random.Random(2)
    settings = {"SESSION_KV_TOKENS": str(KEPT_KV_TOKENS), "SESSION_FEATURES_BYTES": str(KEPT_FEATURE_BYTES)}
    with running_fleet(ROOT / "models" / "tiny-llava", **settings) as fleet:
        client = Client(fleet.runtime)
        pictures = [drawing(rng) for _ in range(count)]
        sessions = [client.open(picture) for picture in pictures]
        first, second = "What color is the shape?", "What shape is it?"
        said = [client.ask(session, first).text for session in sessions]
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
                wrong += answer != client.ask_stateless(pictures[i], [first, said[i], second]).text
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
        save=options.save,
        quick=options.quick,
        rounds=options.rounds,
        parameters=num_parameters,
        sessions=sessions,
    )


if __name__ == "__main__":
    main()
