"""Answers of the engine vllm, with a stand-in for vLLM itself: each one ends with an event, whatever happens to it."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from handlers.engine.contract import AnswerRequest, SamplingParams, TokenEvent
from handlers.engine.vllm.event_loop import EventLoopThread
from handlers.engine.vllm.pool import VllmPool
from handlers.errors import InternalError
from handlers.worker.counters import Counters

STAND_INS = (
    *("vllm", "vllm.config", "vllm.exceptions", "vllm.lora", "vllm.lora.request", "vllm.outputs"),
    *("vllm.sampling_params", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.async_llm", "vllm.v1.engine.exceptions"),
    *("vllm.v1.metrics", "vllm.v1.metrics.loggers"),
)
IMPORTERS = ("engine", "sampling")  # of handlers.engine.vllm; they import vLLM


class StandIn(ModuleType):
    """A module in which each name is a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Exception,), {})
        setattr(self, name, made)
        return made


@pytest.fixture
def loop() -> EventLoopThread:
    return EventLoopThread()


@pytest.fixture
def llm() -> Any:
    """Return a stand-in for vLLM's AsyncLLM, which is idle."""
    return SimpleNamespace(
        vllm_config=SimpleNamespace(device_config=SimpleNamespace(device_type="cpu")),
        model_config=SimpleNamespace(max_model_len=100),
        shutdown=lambda timeout: None,
    )


@pytest.fixture
def engine(llm: Any, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in STAND_INS:
        monkeypatch.setitem(sys.modules, name, StandIn(name))
    for name in IMPORTERS:
        monkeypatch.delitem(sys.modules, f"handlers.engine.vllm.{name}", raising=False)
    from handlers.engine.vllm.engine import VllmEngine

    grammars: Any = SimpleNamespace(is_supported=False, stop=lambda: None)
    steps: Any = SimpleNamespace(pool=VllmPool(100, 1))
    prompts: Any = SimpleNamespace(image_token_id=None, eos_token_ids=())
    yield VllmEngine(llm, loop, prompts, grammars, Counters(), steps, 0)
    for name in IMPORTERS:
        del sys.modules[f"handlers.engine.vllm.{name}"]


class Hearing:
    """The events of one answer."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.is_over = threading.Event()

    def on_event(self, event: TokenEvent) -> bool:
        self.events.append(event)
        self.is_over.set()
        return False

    @property
    def request(self) -> AnswerRequest:
        params = SamplingParams(max_new_tokens=4)
        return AnswerRequest(prompt=[1, 2], images=[], params=params, deadline=1e9, on_event=self.on_event)


@pytest.mark.timeout(60)
def test_an_answer_that_is_cancelled_before_it_begins_ends(engine: Any, loop: EventLoopThread) -> None:
    """A client may leave while the loop is busy with another answer's images, so that neither event has been seen."""
    is_free, hearing, error = threading.Event(), Hearing(), InternalError("the client has left")
    loop.post(is_free.wait)

    cancel = engine.submit(engine.pool.open("scope"), hearing.request)
    cancel(error)
    is_free.set()

    assert hearing.is_over.wait(30)
    assert [event.error for event in hearing.events] == [error]
    engine.stop()


@pytest.mark.timeout(60)
def test_an_answer_that_has_not_begun_ends_when_the_engine_stops(engine: Any, loop: EventLoopThread) -> None:
    is_free, hearing = threading.Event(), Hearing()
    stopping = threading.Thread(target=engine.stop)
    loop.post(is_free.wait)
    engine.submit(engine.pool.open("scope"), hearing.request)
    stopping.start()
    is_free.set()
    stopping.join()

    assert hearing.is_over.is_set()
    assert isinstance(hearing.events[-1].error, InternalError)


@pytest.mark.timeout(60)
def test_a_cancellation_has_no_effect_once_an_answer_has_its_last_token(
    engine: Any, llm: Any, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may still be aborting the answer then, as at a stop string."""
    aborting, is_aborted, hearing = threading.Event(), asyncio.Event(), Hearing()

    async def render(prompt: Any, arrival: float) -> Any:
        return prompt

    async def generate(*args: Any, **options: Any) -> AsyncIterator[Any]:
        try:
            completion = SimpleNamespace(token_ids=[7], logprobs=None, finish_reason=None)
            yield SimpleNamespace(outputs=[completion], num_cached_tokens=0)
        finally:
            aborting.set()
            await is_aborted.wait()

    monkeypatch.setattr(sys.modules["handlers.engine.vllm.engine"], "to_vllm", lambda *args: None)
    llm.renderer = SimpleNamespace(process_for_engine_async=render)
    llm.generate = generate

    cancel = engine.submit(engine.pool.open("scope"), hearing.request)
    assert aborting.wait(30)
    cancel(InternalError("the client has left"))
    loop.post(is_aborted.set)
    engine.stop()

    assert [(event.token_id, event.error) for event in hearing.events] == [(7, None)]
