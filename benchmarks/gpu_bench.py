"""Provides the phases of gpu_report.py with a model, an engine and sequences of random tokens."""

import gc
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu_model import Shape, build_model, kv_bytes
from benchmarks.stepped_engine import NO_DEADLINE
from handlers.engine.builtin.chat_engine import make_engine
from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.kv_cache import SequenceCache
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import AnswerRequest, PlacedImage, SamplingParams, TokenEvent
from handlers.models.llava import LlavaModel
from handlers.settings.engine import EngineSettings

ROWS = (1, 8, 64)
TESTS_TIMEOUT_S = 400.0  # of the GPU tests


@dataclass(slots=True)
class Answer:
    """The tokens of a sequence so far."""

    tokens: list[int] = field(default_factory=list)
    error: Exception | None = None
    first_s: float | None = None

    def on_event(self, event: TokenEvent) -> bool:
        if event.token_id is not None:
            self.tokens.append(event.token_id)
            self.first_s = self.first_s or time.perf_counter()
        self.error = event.error
        return True


class Bench:
    """A model, an engine whose steps the caller runs, and sequences of random tokens."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, *, is_quick: bool) -> None:
        self.device, self.dtype, self.shape, self.is_quick = device, dtype, shape, is_quick
        self.context = 64 if is_quick else 1000
        self.num_steps = 4 if is_quick else 50
        self.rows = (1, 4) if is_quick else ROWS
        self.question = 8 if is_quick else 50
        self.long_context = 512 if is_quick else 8000
        self.generator = torch.Generator().manual_seed(0)
        self._model: LlavaModel | None = None
        self._engine: Engine | None = None
        self._has_options = False
        self.bandwidth = 0.0  # bytes/s, read and written
        self.left_s = TESTS_TIMEOUT_S  # until the report must end
        self.soak_s = 1.0

    @property
    def model(self) -> LlavaModel:
        if self._model is None:
            self._model = build_model(self.shape, self.device, self.dtype)
        return self._model

    def engine(self, **options: Any) -> Engine:
        """Return the common engine, or a new one if options are given.

        The device has room for one engine, so a new one replaces the last. options: num_tokens of the KV cache,
        has_graphs, and settings of the engine.
        """
        if self._engine is not None and (options or self._has_options):
            self.close()
        if self._engine is None:
            self._engine = self._make_engine(**options)
            self._has_options = bool(options)
        return self._engine

    def _make_engine(self, num_tokens: int | None = None, *, has_graphs: bool = True, **settings: Any) -> Engine:
        max_rows = self.rows[-1]
        num_tokens = num_tokens or max_rows * (self.context + 512) + self.long_context + 256
        own = EngineSettings(max_rows=max_rows, **settings)
        return make_engine(self.model, kv_bytes(self.model, num_tokens), own, has_graphs=has_graphs)

    def close(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.runner.close()
            self._engine = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def release(self) -> None:
        """Free the engine and the model, so that another process can use the device."""
        self._model = None
        self.close()

    def prompt(self, length: int) -> list[int]:
        vocabulary = self.shape.vocabulary
        return torch.randint(300, vocabulary, (length,), generator=self.generator).tolist()

    def submit(
        self,
        engine: Engine,
        prompt: list[int],
        num_new: int,
        images: list[PlacedImage] | None = None,
        cache: SequenceCache | None = None,
        **params: Any,
    ) -> tuple[Answer, TokenSequence]:
        """Admit a sequence. cache: of an earlier sequence whose tokens this prompt repeats; None: a new one."""
        answer = Answer()
        if cache is None:
            cache = SequenceCache(engine.runner.pool)
        else:
            cache.match(prompt)
        settings = SamplingParams(max_new_tokens=num_new, **params)
        request = AnswerRequest(
            prompt=prompt, images=images or [], params=settings, deadline=NO_DEADLINE, on_event=answer.on_event
        )
        sequence = TokenSequence(cache, request)
        engine.admit(sequence)
        return answer, sequence

    def finish(self, engine: Engine, *caches: SequenceCache) -> None:
        """Run steps until no sequence is left, then drop the caches."""
        while engine.scheduler.all():
            engine.step()
        for cache in caches:
            cache.drop()

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
