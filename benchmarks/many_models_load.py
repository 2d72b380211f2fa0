"""What many_models.py asks, what is right, and what a request costs whom."""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.fleet import cpu_of
from benchmarks.report import median
from scripts.make_minilm import TOLD_BY, WEIGHTS, scale_of

TEXTS = (
    "The quarterly figures were better than anybody had expected, but the shares fell all the same.",
    "How do I reset the password of an account whose owner has left the company?",
    "A red circle stands to the left of two green squares.",
)
TOLERANCE = 1e-4  # the nearest that answers of two variants come to each other is 7e-4
NUM_CLIENTS = 6
TARGET_MODEL = "X-Amzn-SageMaker-Target-Model"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a request: processor time of the JVM and the worker, and time on the clock."""

    cpu_ms: float
    wall_ms: float


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: for a model at a URL; model None: the URL says which one. number: of the variant, for what is right,
    None if an error is right.
    """

    url: str
    model: str | None
    number: int | None
    text: int = 0


class Reference:
    """The checkpoint in this process: what its variants answer, and what reading its file and one pass cost."""

    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModel.from_pretrained(checkpoint).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._weight = self._model.get_parameter(TOLD_BY)
        self._told_by = self._weight.detach().clone()
        self._file = checkpoint / WEIGHTS
        self._buffer = bytearray(self._file.stat().st_size)
        self._known: dict[tuple[int, int], torch.Tensor] = {}

    def is_right(self, number: int, text: int, body: bytes) -> bool:
        if (number, text) not in self._known:
            self._weight.data = self._told_by * scale_of(number)
            self._known[number, text] = self._pass(text)
        found = torch.tensor(json.loads(body)["embeddings"])
        return bool((found - self._known[number, text]).norm() < TOLERANCE)

    def read_and_pass(self) -> Cost:
        """The file into memory that is there already, then one forward pass of a model that is."""
        began, cpu = time.perf_counter(), time.process_time()
        with self._file.open("rb", buffering=0) as file:
            assert file.readinto(self._buffer) == len(self._buffer)
        self._pass(0)
        return Cost(1000 * (time.process_time() - cpu), 1000 * (time.perf_counter() - began))

    def _pass(self, text: int) -> torch.Tensor:
        with torch.inference_mode():
            hidden = self._model(**self._tokenizer(TEXTS[text], return_tensors="pt")).last_hidden_state[0].mean(0)
            return hidden / hidden.norm()


class Load:
    """Sends requests and counts in `wrong` the answers that are not right: lost ones, another model's, no error."""

    def __init__(self, reference: Reference) -> None:
        self.wrong = 0
        self.right: set[str] = set()  # models
        self.reference = reference
        self._own = threading.local()

    def measure(self, asks: Sequence[Ask], pids: Sequence[int]) -> Cost:
        """One after the other. pids: who works on them."""
        answers, walls = [], []
        before = cpu_of(pids)
        for ask in asks:
            began = time.perf_counter()
            answers.append(self._send(ask))
            walls.append(1000 * (time.perf_counter() - began))
        cpu_ms = 1000 * (cpu_of(pids) - before) / len(asks)
        self._check(asks, answers)
        return Cost(cpu_ms, median(walls))

    def run(self, asks: Sequence[Ask], in_the_middle: Callable[[], None] = lambda: None) -> None:
        """Several clients at once; one of them calls `in_the_middle` while the others are at work."""
        half = len(asks) // 2
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            first = clients.map(self._send, asks[:half])
            called = clients.submit(in_the_middle)
            second = clients.map(self._send, asks[half:])
            self._check(asks, [*first, *second])
        called.result()

    def _check(self, asks: Sequence[Ask], answers: Sequence[tuple[int, bytes]]) -> None:
        for ask, (status, body) in zip(asks, answers, strict=True):
            if ask.number is None:
                is_right = 400 <= status < 500
            else:
                is_right = status == 200 and self.reference.is_right(ask.number, ask.text, body)
            if is_right and ask.number is not None and ask.model is not None:
                self.right.add(ask.model)
            if not is_right:
                self.wrong += 1
                print(f"  wrong: {ask.model or ask.url} {status} {body[:200]!r}")

    def _send(self, ask: Ask) -> tuple[int, bytes]:
        """Status and body; 0 if the connection broke, which counts as lost."""
        url = urlsplit(ask.url)
        connections: dict[str, http.client.HTTPConnection] = self._own.__dict__.setdefault("connections", {})
        connection = connections.setdefault(url.netloc, http.client.HTTPConnection(url.netloc, timeout=120))
        headers = {"Content-Type": "application/json", **({TARGET_MODEL: ask.model} if ask.model else {})}
        try:
            connection.request("POST", url.path, json.dumps({"inputs": TEXTS[ask.text]}), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as exc:
            connection.close()
            return 0, repr(exc).encode()


def zipf(count: int, number: int, seed: int) -> list[int]:
    """Numbers of models, wanted like words of a language."""
    return random.Random(seed).choices(range(count), [1 / rank for rank in range(1, count + 1)], k=number)
