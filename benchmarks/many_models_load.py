"""Sends the requests of many_models.py, checks their answers, and measures their cost."""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.fleet import cpu_of
from scripts.make_minilm import SCALED_TENSOR, WEIGHTS, scale_of

TEXTS = (
    "The quarterly figures were better than anybody had expected, but the shares fell all the same.",
    "How do I reset the password of an account whose owner has left the company?",
    "A red circle stands to the left of two green squares.",
)
TOLERANCE = 1e-4  # the smallest distance between answers of two variants is 7e-4
NUM_CLIENTS = 6
TARGET_MODEL = "X-Amzn-SageMaker-Target-Model"


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time per request of the JVM and the worker, and median elapsed time."""

    cpu_ms: float
    wall_ms: float


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request for a model's embedding of a text.

    model: None if the URL names it. number: of the variant whose answer is expected; None if an error is expected.
    text: index into TEXTS.
    """

    url: str
    model: str | None
    number: int | None
    text: int = 0


class Reference:
    """Computes the variants' answers in this process, and measures reading the checkpoint's file and one pass."""

    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModel.from_pretrained(checkpoint).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._scaled = self._model.get_parameter(SCALED_TENSOR)
        self._unscaled = self._scaled.detach().clone()
        self._file = checkpoint / WEIGHTS
        self._buffer = bytearray(self._file.stat().st_size)
        self._known: dict[tuple[int, int], torch.Tensor] = {}

    def is_right(self, number: int, text: int, body: bytes) -> bool:
        if (number, text) not in self._known:
            self._scaled.data = self._unscaled * scale_of(number)
            self._known[number, text] = self._pass(text)
        found = torch.tensor(json.loads(body)["embeddings"])
        return bool((found - self._known[number, text]).norm() < TOLERANCE)

    def read_and_pass(self) -> Cost:
        """Measure reading the file into allocated memory, and one forward pass of a loaded model."""
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
    """Sends requests and checks their answers.

    wrong: requests without an answer, with that of another model, or without the expected error. correct_models: those
    that have answered correctly.
    """

    def __init__(self, reference: Reference) -> None:
        self.wrong = 0
        self.correct_models: set[str] = set()
        self.reference = reference
        self._own = threading.local()

    def measure(self, requests: Sequence[ModelRequest], pids: Sequence[int]) -> Cost:
        """Send requests one after the other and return their cost. pids: the processes that serve them."""
        answers, walls = [], []
        before = cpu_of(pids)
        for request in requests:
            began = time.perf_counter()
            answers.append(self._send(request))
            walls.append(1000 * (time.perf_counter() - began))
        cpu_ms = 1000 * (cpu_of(pids) - before) / len(requests)
        self._check(requests, answers)
        return Cost(cpu_ms, median(walls))

    def run(self, requests: Sequence[ModelRequest], in_the_middle: Callable[[], None] = lambda: None) -> None:
        """Send requests from several threads. in_the_middle: is called between the two halves of the requests."""
        half = len(requests) // 2
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            first = clients.map(self._send, requests[:half])
            called = clients.submit(in_the_middle)
            second = clients.map(self._send, requests[half:])
            self._check(requests, [*first, *second])
        called.result()

    def _check(self, requests: Sequence[ModelRequest], answers: Sequence[tuple[int, bytes]]) -> None:
        for request, (status, body) in zip(requests, answers, strict=True):
            if request.number is None:
                is_right = 400 <= status < 500
            else:
                is_right = status == 200 and self.reference.is_right(request.number, request.text, body)
            if is_right and request.number is not None and request.model is not None:
                self.correct_models.add(request.model)
            if not is_right:
                self.wrong += 1
                print(f"  wrong: {request.model or request.url} {status} {body[:200]!r}")

    def _send(self, request: ModelRequest) -> tuple[int, bytes]:
        """Return status and body; status 0 if the connection broke."""
        url = urlsplit(request.url)
        connections: dict[str, http.client.HTTPConnection] = self._own.__dict__.setdefault("connections", {})
        connection = connections.setdefault(url.netloc, http.client.HTTPConnection(url.netloc, timeout=120))
        headers = {"Content-Type": "application/json", **({TARGET_MODEL: request.model} if request.model else {})}
        try:
            connection.request("POST", url.path, json.dumps({"inputs": TEXTS[request.text]}), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as exc:
            connection.close()
            return 0, repr(exc).encode()


def zipf(count: int, number: int, seed: int) -> list[int]:
    """Return `number` of `count` model numbers, drawn with Zipf's distribution."""
    return random.Random(seed).choices(range(count), [1 / rank for rank in range(1, count + 1)], k=number)
