"""Random conversations on two workers with little memory: each answer is right, and at the end nothing is held."""

import hashlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from handlers.journal.url import open_journal
from handlers.models.loader import load_model
from handlers.settings.journal import JournalSettings
from scripts.make_adapters import make_adapters
from tests.torchserve.drawings import draw_image
from tests.unit.handlers.conftest import Client, Exchange, Reference, ServiceFactory
from tests.unit.handlers.merged import add_adapter
from tests.unit.handlers.test_chat_service import data_url, features_bytes, kv_bytes, question, reply_of
from tests.waiting import wait_until

SEEDS = range(int(os.environ.get("RANDOM_CONVERSATIONS", "2")))
NUM_ACTIONS = 60
NUM_TOKENS = 5
TEXTS = ("what is it?", "what colour is it?", "Please say where it is, and what shape it has. " * 2, "and now?")
TARGET = "x-amzn-sagemaker-target-model"
SCARCE = ("OutOfMemory", "Overloaded")


@dataclass(eq=False)
class Talk:
    """A session as its client knows it."""

    sid: str
    adapter: str
    images: list[Image.Image]
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_turns: int = 0


@dataclass(eq=False)
class Asked:
    """A request without an answer yet. expected: its answer, if it is greedy. talk: its session."""

    exchange: Exchange
    expected: str | None
    talk: Talk | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    is_cancelled: bool = False


class Expected:
    """The greedy answers of transformers, with or without an adapter in the weights."""

    def __init__(self, checkpoint: Path, folders: list[Path]) -> None:
        self._models = {"": Reference(checkpoint)}
        for folder in folders:
            self._models[folder.name] = Reference(checkpoint)
            add_adapter(self._models[folder.name].model, folder)
        self._known: dict[str, str] = {}

    def __call__(self, adapter: str, messages: list[dict[str, Any]], images: list[Image.Image]) -> str:
        key = json.dumps([adapter, messages, [hashlib.sha256(image.tobytes()).hexdigest() for image in images]])
        if key not in self._known:
            self._known[key] = self._models[adapter](messages, images, NUM_TOKENS)
        return self._known[key]


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_adapters(checkpoint, tmp_path_factory.mktemp("adapters"), 2, strength=1.0)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, folders: list[Path], one_thread: None) -> Expected:
    return Expected(checkpoint, folders)


@pytest.fixture(scope="module")
def adapted(checkpoint: Path, one_thread: None) -> list[Any]:
    """Load a model for each worker, because the adapters of a step are stored in its layers."""
    return [load_model(checkpoint, torch.device("cpu"), "float32", max_rank=16) for _ in range(2)]


class Crowd:
    """Clients that act at random. Only lack of memory, or the client's own actions, may refuse a request."""

    def __init__(self, rng: random.Random, clients: list[Client], expected: Expected, pictures: list[Any]) -> None:
        self.answered = 0
        self._rng = rng
        self._clients = clients
        self._expected = expected
        self._pictures = pictures
        self._talks: list[Talk] = []
        self._asked: list[Asked] = []

    def act(self) -> None:
        actions: list[tuple[Callable[[], None], int]] = [
            (self._open, 2),
            (self._ask, 6),
            (self._complete, 3),
            (self._cancel, 1),
            (self._branch, 1),
            (self._close, 1),
            (self._await_one, 5),
        ]
        names, weights = zip(*actions, strict=True)
        self._rng.choices(names, weights)[0]()

    def end(self) -> None:
        while self._asked:
            self._await_one()
        while self._talks:
            self._close()

    def _client(self) -> Client:
        return self._rng.choice(self._clients)

    def _adapter(self) -> str:
        return self._rng.choice(["", "adapter-000", "adapter-001"])

    def _idle(self) -> list[Talk]:
        busy = [each.talk for each in self._asked]
        return [talk for talk in self._talks if talk not in busy]

    def _headers(self, adapter: str) -> dict[str, str]:
        return {"x-torchmoor-endpoint": "llava", TARGET: adapter or "llava"}

    def _open(self) -> None:
        adapter, images = self._adapter(), self._rng.sample(self._pictures, self._rng.choice([0, 0, 1, 1, 2]))
        body: dict[str, Any] = {"requestType": "NEW_SESSION"}
        if images:
            body = {"type": "start_session", "images": [data_url(image) for image in images]}
        opened = self._client().call(body, self._headers(adapter))
        if opened.status == 200:
            self._talks.append(Talk(opened.json["session_id"], adapter, images))
        else:
            assert opened.error in SCARCE, opened.body

    def _ask(self) -> None:
        idle = self._idle()
        if not idle:
            return
        talk, text = self._rng.choice(idle), self._rng.choice(TEXTS)
        num_images = len(talk.images) if not talk.num_turns else 0
        messages = [*talk.messages, question(text, num_images)]
        is_greedy = self._rng.random() < 0.8
        exchange = self._client().ask(
            talk.sid,
            text,
            headers={"x-torchmoor-endpoint": "llava"},
            parameters={"max_new_tokens": NUM_TOKENS, **({} if is_greedy else {"temperature": 3.0})},
            stream=self._rng.random() < 0.5,
        )
        answer = self._expected(talk.adapter, messages, talk.images) if is_greedy else None
        self._asked.append(Asked(exchange, answer, talk, messages))

    def _complete(self) -> None:
        adapter, text = self._adapter(), self._rng.choice(TEXTS)
        image = self._rng.choice([None, *self._pictures])
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if image is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": data_url(image)}})
        is_greedy = self._rng.random() < 0.7
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": NUM_TOKENS,
            "temperature": 0 if is_greedy else 3.0,
            "n": self._rng.choice([1, 1, 3]),
            "stream": self._rng.random() < 0.3,
        }
        answer = None
        if is_greedy:
            shown = [] if image is None else [image]
            answer = self._expected(adapter, [question(text, len(shown))], shown)
        self._asked.append(Asked(self._client().send(body, self._headers(adapter)), answer))

    def _cancel(self) -> None:
        if self._asked:
            asked = self._rng.choice(self._asked)
            asked.exchange.reply.cancel()
            asked.is_cancelled = True

    def _branch(self) -> None:
        parents = [talk for talk in self._idle() if talk.num_turns]
        if not parents:
            return
        parent = self._rng.choice(parents)
        turns = self._rng.randint(1, parent.num_turns)
        body = {"type": "branch_session", "session_id": parent.sid, "turns": turns}
        opened = self._client().call(body, {"x-torchmoor-endpoint": "llava"})
        if opened.status == 200:
            messages = parent.messages[: 2 * turns]
            self._talks.append(Talk(opened.json["session_id"], parent.adapter, parent.images, messages, turns))
        else:
            assert opened.error in SCARCE, opened.body

    def _close(self) -> None:
        if not self._talks:
            return
        talk = self._talks.pop(self._rng.randrange(len(self._talks)))
        for asked in self._asked:
            asked.is_cancelled = asked.is_cancelled or asked.talk is talk
        self._end(talk)

    def _end(self, talk: Talk) -> None:
        body = {"type": "close_session", "session_id": talk.sid}
        assert self._client().call(body, {"x-torchmoor-endpoint": "llava"}).status == 200
        for other in self._clients:  # as the proxy does
            ending = {"x-torchmoor-operation": "end-closed"}
            assert other.call({"session_ids": [talk.sid]}, ending).status == 200

    def _await_one(self) -> None:
        if not self._asked:
            return
        asked = self._asked.pop(self._rng.randrange(len(self._asked)))
        exchange, talk = asked.exchange.wait(), asked.talk
        if asked.is_cancelled:  # perhaps it was recorded before
            if talk is not None and talk in self._talks:
                self._talks.remove(talk)
                self._end(talk)
            return
        if exchange.status != 200:
            assert exchange.error in SCARCE, exchange.body
            return
        self.answered += 1
        texts = _texts(exchange, is_completion=talk is None)
        if asked.expected is not None:
            assert texts == [asked.expected] * len(texts), asked
        if talk is not None:
            talk.messages = [*asked.messages, reply_of(texts[0])]
            talk.num_turns += 1


def _texts(exchange: Exchange, *, is_completion: bool) -> list[str]:
    """Return the answers to a request."""
    is_stream = not exchange.headers["Content-Type"].startswith("application/json")
    if not is_completion:
        return [exchange.body.decode() if is_stream else exchange.json["response_text"]]
    if not is_stream:
        return [choice["message"]["content"] for choice in exchange.json["choices"]]
    texts: dict[int, str] = {}
    for line in exchange.body.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return [texts[index] for index in sorted(texts)]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_conversations_are_right_and_leave_nothing(
    make_client: ServiceFactory,
    adapted: list[Any],
    folders: list[Path],
    expected: Expected,
    tmp_path: Path,
    seed: int,
) -> None:
    """Sessions are opened, asked, branched, moved, cancelled and closed beside completions of several choices."""
    rng = random.Random(seed)
    settings = JournalSettings(url=tmp_path.as_uri(), max_kv_bytes=1 << 30, kv_idle_s=0.0)
    kv_tokens = rng.choice([250, 400, 1200])

    def start(number: int) -> Client:
        instance, model = f"llava-{number}", adapted[number]
        return make_client(
            model,
            instance,
            open_journal(settings, {"k0": b"k" * 32}),
            {"max_kv_bytes": settings.max_kv_bytes, "kv_idle_s": 0.0},
            session={
                "kv_bytes": kv_bytes(model, kv_tokens),
                "features_bytes": rng.choice([2, 4]) * features_bytes(model),
                "max_sessions": rng.choice([3, 50]),
            },
            engine={"max_rows": rng.choice([2, 6]), "prefill_chunk": rng.choice([16, 256])},
            adapters={"source": folders[0].parent.as_uri(), "max_bytes": rng.choice([1, 4]) << 20},
            many={"cache_dir": str(tmp_path / instance)},
        )

    clients = [start(number) for number in range(2)]
    pictures = [draw_image("ellipse", "red"), draw_image("rectangle", "blue"), draw_image("ellipse", "green")]
    crowd = Crowd(rng, clients, expected, pictures)

    for _ in range(NUM_ACTIONS):
        crowd.act()
    crowd.end()

    assert crowd.answered > 5
    for client in clients:
        wait_until(lambda client=client: not _held(client), "nothing is held")
        client.pool.check_integrity([])
        client.service.images.check_integrity(0)


def _held(client: Client) -> dict[str, int]:
    """Return what a worker still holds without sessions and requests."""
    status: Any = client.service.status()
    held = {
        "sessions": status["sessions"]["open"],
        "turns": status["turns"]["in_progress"] + status["turns"]["running"],
        "leases": sum(model.get("leases", 0) for model in status["models"]),
        "rows": len(client.engine.scheduler.all()),
        "decoding": status["decoding"]["bytes"],
        "admission": client.service.admission.num_using + client.service.admission.num_waiting,
        "chars": client.service.store.num_chars,
    }
    return {name: number for name, number in held.items() if number}
