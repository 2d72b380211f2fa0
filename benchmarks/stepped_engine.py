"""Runs the steps of an engine on the caller's thread, for benchmarks that measure steps without their prompts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from handlers.engine.builtin.chat_engine import DEFAULT_CPU_KV_BYTES, make_engine
from handlers.engine.builtin.kv_cache import SequenceCache
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import AnswerRequest, SamplingParams, TokenEvent
from handlers.models.lora import LoraAdapter
from handlers.models.text import TextModel
from handlers.settings.engine import EngineSettings

NO_DEADLINE = float("inf")


@dataclass(frozen=True, slots=True)
class Row:
    """One answer to generate."""

    params: SamplingParams
    adapter: LoraAdapter | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """The events of each row; number and processor time of the steps that follow the prompts."""

    events: list[list[TokenEvent]]
    num_steps: int
    cpu_s: float


class SteppedEngine:
    """The built-in engine as a worker assembles it, without its thread."""

    def __init__(self, model: TextModel, max_rows: int) -> None:
        self._engine = make_engine(model, DEFAULT_CPU_KV_BYTES, EngineSettings(max_rows=max_rows))
        self._scopes = count()

    def generate(self, prompt: list[int], rows: Sequence[Row]) -> Generated:
        """Answer the same prompt once per row. Each row has a cache of its own and computes the whole prompt."""
        events: list[list[TokenEvent]] = [[] for _ in rows]
        caches = [SequenceCache(self._engine.runner.pool, scope=str(next(self._scopes))) for _ in rows]
        for row, own_events, cache in zip(rows, events, caches, strict=True):
            cache.pin()
            cache.match(prompt, "" if row.adapter is None else row.adapter.version)

            def on_event(event: TokenEvent, own_events: list[TokenEvent] = own_events) -> bool:
                own_events.append(event)
                return True

            request = AnswerRequest(
                prompt=prompt,
                images=[],
                params=row.params,
                deadline=NO_DEADLINE,
                on_event=on_event,
                adapter=row.adapter,
            )
            self._engine.admit(TokenSequence(cache, request))
        while not all(events):
            self._engine.step()
        began, num_before = time.process_time(), self._engine.num_steps
        while self._engine.scheduler.all():
            self._engine.step()
        cpu_s = time.process_time() - began
        for cache in caches:
            cache.unpin()
            cache.drop()
        return Generated(events, self._engine.num_steps - num_before, cpu_s)
