"""Provide the handlers' tests with a clock, the tiny checkpoint, and a chat service with an in-process client."""

import json
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from handlers.chat.commands import Command
from handlers.chat.dialects import table
from handlers.chat.images.loader import ImageLoader
from handlers.chat.service import ChatService
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.engine.builtin.chat_engine import BuiltinEngine, make_engine
from handlers.engine.builtin.engine import Engine
from handlers.engine.grammar import GrammarCompiler
from handlers.errors import ImageUnreachable, InternalError
from handlers.journal.directory import DirectoryJournal
from handlers.journal.journal import Journal
from handlers.many.adapters import AdapterStore, open_adapters
from handlers.models.llava import LlavaModel
from handlers.models.loader import load_model
from handlers.requests.incoming import Incoming
from handlers.requests.reply import PendingReply, ReplyPieces, WholeReply
from handlers.settings.adapters import AdapterSettings
from handlers.settings.engine import EngineSettings
from handlers.settings.grammar import GrammarSettings
from handlers.settings.handler import HandlerSettings
from handlers.settings.intake import IntakeSettings
from handlers.settings.journal import JournalSettings
from handlers.settings.many import ManySettings
from handlers.settings.pump import PumpSettings
from handlers.settings.request import RequestSettings
from handlers.settings.session import ChatSessionSettings
from tests.torchserve.drawings import draw_image
from tests.unit.handlers.journal_stores import store as store
from tests.unit.handlers.tiny_checkpoints import copy_with_two_layers
from tests.waiting import DEADLINE_S, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ResourceWarning)  # TorchServe leaves its version file open
    import ts
    from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

DEMO = Path(__file__).parents[3] / "models" / "tiny-llava"


def make_incoming(headers: Mapping[str, str], body: Any = None) -> Incoming:
    """Return a request as the pump reads it. body: bytes, the fields of a form if one of them is bytes, or JSON."""
    if body is None or isinstance(body, bytes | bytearray):
        return Incoming(dict(headers), body or b"")
    if isinstance(body, dict) and any(isinstance(value, bytes) for value in body.values()):
        return Incoming(dict(headers), form=body)
    return Incoming(dict(headers), json.dumps(body).encode())


def parse(incoming: Incoming) -> Command:
    """Read a request with the default settings."""
    return table.parse(incoming, RequestSettings())


class FakeClock:
    """A clock that tests advance. It begins with the current second, since journals also read their files' times."""

    def __init__(self) -> None:
        self.now = float(int(time.time()))

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class EndlessModel:
    """The real model without end tokens, so that answers reach their length; the test chooses which sequences fail."""

    def __init__(self, model: LlavaModel) -> None:
        self.real = model
        self.eos_token_ids: frozenset[int] = frozenset()
        self.before_step: Callable[[torch.Tensor, Any], None] = lambda embeds, batch: None
        self.after_step: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, batch: Any, last: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        self.before_step(embeds, batch)
        return self.after_step(self.real.forward(embeds, positions, batch, last))


class Exchange:
    """A request in progress; it reads the reply as the pump does.

    reads_at_once: read the output of each of the engine's steps before the next, so that an answer has all its pieces.
    """

    def __init__(self, *, reads_at_once: bool = False) -> None:
        self._reads_at_once = reads_at_once
        self._changed = threading.Condition()
        self._num_wakes = 0
        self.reply = PendingReply(self._wake)
        self.headers: dict[str, str] = {}
        self.status: int | None = None
        self.body = b""
        self.pieces: list[bytes] = []
        self.is_over = False

    def _wake(self) -> None:
        with self._changed:
            if self._reads_at_once:
                self.read()
            self._num_wakes += 1
            self._changed.notify_all()

    def read(self) -> None:
        """Read the available output."""
        while not self.is_over and self.reply.has_news():
            said = self.reply.take(1 << 20)
            if isinstance(said, WholeReply):
                self.status, self.headers, self.body, self.is_over = said.status, dict(said.headers), said.body, True
            elif isinstance(said, ReplyPieces):
                if said.headers is not None:
                    assert not said.is_end
                    self.status, self.headers = 200, dict(said.headers)
                self.pieces.append(said.data)
                self.body += said.data
                self.is_over = said.is_end

    def wait_until(self, is_reached: Callable[["Exchange"], bool]) -> "Exchange":
        """Read until a condition holds; fail the test if it never does."""
        with self._changed:
            seen = -1
            while True:
                if seen != self._num_wakes:
                    seen = self._num_wakes
                    self.read()
                    if is_reached(self):
                        return self
                assert self._changed.wait(DEADLINE_S), f"no answer: status={self.status} body={self.body[:200]!r}"

    def wait(self) -> "Exchange":
        """Read to the end."""
        return self.wait_until(lambda exchange: exchange.is_over)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str | None:
        """Return the error's code, which header and body must agree on."""
        code = self.headers.get("x-torchmoor-error")
        if code is not None:
            assert self.json["error"]["code"] == code
        return code


class Client:
    """A client of the session API that calls a service without TorchServe."""

    def __init__(self, service: ChatService, engine: Engine, adapters: AdapterStore | None) -> None:
        self.service = service
        self.adapters = adapters
        self.engine = engine
        self.pool = engine.runner.pool

    def session(self, session_id: str) -> Session:
        """Return an open session."""
        (found,) = [session for session in self.service.store.snapshot() if session.id.text == session_id]
        return found

    def begin_stop(self) -> threading.Thread:
        """Stop the service on a thread of its own; return the thread once the service accepts no more work."""

        def refuses_work() -> bool:
            try:
                self.engine.call(lambda: None)
            except InternalError:
                return True
            return False

        stopping = threading.Thread(target=self.service.stop)
        stopping.start()
        wait_until(refuses_work, "the engine refuses work")
        return stopping

    def send(self, body: Any, headers: Mapping[str, str] | None = None) -> Exchange:
        exchange = Exchange()
        self.service.start(make_incoming(headers or {}, body), exchange.reply)
        return exchange

    def call(self, body: Any, headers: Mapping[str, str] | None = None) -> Exchange:
        return self.send(body, headers).wait()

    def open(self, *images: str, **fields: Any) -> str:
        body = {"type": "start_session", "images": list(images)} if images else {"requestType": "NEW_SESSION"}
        answer = self.call({**body, **fields})
        assert answer.status == 200, answer.body
        return str(answer.json["session_id"])

    def ask(self, session_id: str, prompt: str, *, headers: Mapping[str, str] | None = None, **fields: Any) -> Exchange:
        body = {"type": "send_text_prompt", "session_id": session_id, "prompt_text": prompt, **fields}
        return self.send(body, headers)

    def answer(self, session_id: str, prompt: str, **fields: Any) -> str:
        answer = self.ask(session_id, prompt, **fields).wait()
        assert answer.status == 200, answer.body
        return str(answer.json["response_text"])


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def one_thread() -> None:
    """Run torch on one thread: the machine is shared, and sums keep one order."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llava(one_thread: None, checkpoint: Path) -> LlavaModel:
    """Load the checkpoint as the handlers do, in float32."""
    return load_model(checkpoint, torch.device("cpu"), "float32")


@pytest.fixture(scope="session")
def demo_llava(one_thread: None) -> LlavaModel:
    """Load the whole demo checkpoint, whose answers are about the image."""
    return load_model(DEMO, torch.device("cpu"), "float32")


@pytest.fixture
def endless_llava(tiny_llava: LlavaModel) -> EndlessModel:
    """Return the same weights with the test's controls."""
    return EndlessModel(tiny_llava)


class Reference:
    """The greedy answers of transformers alone, without a session."""

    def __init__(self, checkpoint: Path) -> None:
        self._processor = AutoProcessor.from_pretrained(checkpoint, local_files_only=True)
        loader = AutoModelForImageTextToText
        self.model = loader.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True).eval()

    def __call__(self, messages: list[dict[str, Any]], images: list[Image.Image], max_new_tokens: int) -> str:
        """Return the answer to a conversation."""
        text = self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.complete(text, images, max_new_tokens, adds_special=False)

    def complete(self, text: str, images: list[Image.Image], max_new_tokens: int, *, adds_special: bool = True) -> str:
        """Return the continuation of a raw prompt, in which `<image>` stands for an image."""
        inputs = self._processor(text=text, images=images or None, return_tensors="pt", add_special_tokens=adds_special)
        with torch.inference_mode():
            output = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        start = inputs["input_ids"].shape[1]
        return str(self._processor.tokenizer.decode(output[0, start:], skip_special_tokens=True))


@pytest.fixture(scope="session")
def reference(one_thread: None, checkpoint: Path) -> Reference:
    """Return a function of (messages, images, max_new_tokens)."""
    return Reference(checkpoint)


def make_settings(**groups: dict[str, Any]) -> HandlerSettings:
    kinds = {
        "session": ChatSessionSettings,
        "intake": IntakeSettings,
        "request": RequestSettings,
        "engine": EngineSettings,
        "pump": PumpSettings,
        "journal": JournalSettings,
        "adapters": AdapterSettings,
        "many": ManySettings,
    }
    return HandlerSettings(**{name: kinds[name](**values) for name, values in groups.items()})


ServiceFactory = Callable[..., Client]


@pytest.fixture
def make_client(tiny_llava: LlavaModel, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceFactory]:
    """Build clients with their own services; at the end nothing may be pinned, running or miscounted.

    Sessions expire, and journals are swept, when a test or a request causes it, not every second.
    """
    monkeypatch.setattr("handlers.chat.sessions.expiry.INTERVAL_S", 3600.0)
    clients: list[Client] = []

    def make(
        model: Any = tiny_llava,
        instance: str = "local",
        journal: Journal | None = None,
        journal_settings: Mapping[str, Any] | None = None,
        **groups: dict[str, Any],
    ) -> Client:
        groups["session"] = {"kv_bytes": 64 << 20, **groups.get("session", {})}
        settings = make_settings(**groups, journal=dict(journal_settings or {}))
        engine = make_engine(model, settings.session.kv_bytes, settings.engine)
        ids = SessionIdMinter({"k0": b"k" * 32}, instance)
        builtin = BuiltinEngine(engine, settings.grammar)
        adapters = open_adapters(settings, Path("/"), builtin)
        service = ChatService(settings, model, builtin, ids, ImageLoader(settings.intake), clock, journal, adapters)
        builtin.start()
        clients.append(Client(service, engine, adapters))
        return clients[-1]

    yield make
    problems = []
    for client in clients:
        service, engine = client.service, client.engine
        service.stop()
        if client.adapters is not None:
            client.adapters.close()
        engine.check_integrity()
        store = service.store
        store.check_integrity()
        status: Any = service.status()
        turns = status["turns"]
        if turns["running"] or turns["waiting"] or turns["in_progress"] or engine.scheduler.all():
            problems.append(f"left behind: {turns} {engine.scheduler}")
        if service.admission.num_using or service.admission.num_waiting:
            problems.append(repr(service.admission))
    assert not problems


@pytest.fixture
def client(make_client: ServiceFactory) -> Client:
    """Return a client of a service with the defaults."""
    return make_client()


@pytest.fixture
def metrics_cache() -> Any:
    """Return TorchServe's own cache of metric objects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its configuration file open
        return MetricsCacheYamlImpl(Path(ts.__file__).parent / "configs" / "metrics.yaml")


@pytest.fixture
def kept_loggers() -> Iterator[None]:
    """Restore the process's loggers that a worker's start changes."""
    loggers = [logging.getLogger(name) for name in ("", "handlers", "ts.metrics.caching_metric")]
    before = [(logger.level, list(logger.filters)) for logger in loggers]
    yield
    for logger, (level, filters) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.filters[:] = filters


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo checkpoint with two layers of each of its models, which halves the cost of a step.

    Its answers do not describe images; the tests compare them with those of transformers.
    """
    folder = tmp_path_factory.mktemp("checkpoint")
    copy_with_two_layers(DEMO, folder)
    return folder


@pytest.fixture
def red() -> Image.Image:
    return draw_image("ellipse", "red")


@pytest.fixture
def blue() -> Image.Image:
    return draw_image("rectangle", "blue", 120)


@pytest.fixture
def journal(tmp_path: Path) -> DirectoryJournal:
    return DirectoryJournal(tmp_path / "journal", JournalSettings())


@pytest.fixture
def two_workers(make_client: Any, journal: Journal) -> tuple[Any, Any]:
    """Return two workers of one fleet with the same keys and journal."""
    return make_client(instance="llava-0", journal=journal), make_client(instance="llava-1", journal=journal)


@pytest.fixture(scope="module")
def compiler(tiny_llava: Any) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tiny_llava.tokenizer, tiny_llava.eos_token_ids, tiny_llava.vocabulary, GrammarSettings())
    yield made
    made.stop()


class SlowImages:
    """Servers of images that fail once they may. arrived: counts the requests for images."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.may_fail = threading.Event()

    def read(self, reference: Any, reply: Any) -> bytes:
        self.arrived.release()
        assert self.may_fail.wait(30)
        raise ImageUnreachable("too slow")


@pytest.fixture
def slow_images(monkeypatch: pytest.MonkeyPatch) -> SlowImages:
    """Make every image's server slow."""
    servers = SlowImages()
    monkeypatch.setattr(ImageLoader, "read", lambda loader, reference, reply: servers.read(reference, reply))
    return servers
