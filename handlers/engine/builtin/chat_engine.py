"""The built-in engine behind the interface of engine/contract.py."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from PIL.Image import Image
from torch import Tensor

from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.kv_cache import BlockPool
from handlers.engine.builtin.kv_parts import BlockParts
from handlers.engine.builtin.pace import make_pace
from handlers.engine.builtin.runner import ModelRunner
from handlers.engine.builtin.scheduler import Scheduler
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import (
    AnswerRequest,
    Cancel,
    Capabilities,
    EngineNumbers,
    GrammarText,
    KvCache,
)
from handlers.engine.grammar import Grammar, GrammarCompiler
from handlers.errors import OutOfMemory
from handlers.models.lora import LoraAdapter
from handlers.models.memory import is_out_of_memory
from handlers.models.text import TextModel
from handlers.settings.engine import EngineSettings
from handlers.settings.grammar import GrammarSettings
from handlers.worker.counters import Counters
from handlers.worker.device import exit_worker


class BuiltinEngine:
    """Implements `ChatEngine`. An image's encoded form is its features, (tokens, hidden size), on the device."""

    def __init__(self, engine: Engine, grammar: GrammarSettings) -> None:
        self._engine = engine
        self._model = model = engine.runner.model
        self.counters = Counters()
        self._grammars = GrammarCompiler(model.tokenizer, model.eos_token_ids, model.vocabulary, grammar, self.counters)
        self.pool: BlockPool = engine.runner.pool
        self.kv_parts = BlockParts(engine)
        self.capabilities = Capabilities(
            engine="builtin",
            device=str(model.device),
            max_context=model.max_context,
            is_packed=model.is_packed,
            can_resume=True,
            has_grammars=self._grammars.is_supported,
            has_equal_images=model.has_equal_images,
            image_side=model.image_side,
        )

    def start(self) -> None:
        self._engine.start()

    def stop(self) -> None:
        self._grammars.stop()
        self._engine.stop()

    def numbers(self) -> EngineNumbers:
        scheduler = self._engine.scheduler
        return EngineNumbers(self._engine.num_steps, len(scheduler.running), len(scheduler.waiting))

    def encode(self, image: Image) -> Tensor:
        try:
            pixels = self._model.preprocess(image)
        except (MemoryError, RuntimeError) as exc:
            if not is_out_of_memory(exc):
                raise
            raise OutOfMemory("this machine ran out of memory while reading an image; try again later") from exc
        return self._engine.encode_image(pixels)

    def compile_grammar(self, source: GrammarText) -> Grammar:
        return self._grammars.compile(source)

    def load_adapter(self, folder: Path) -> LoraAdapter:
        model = self._model
        assert model.adapted is not None  # the settings name adapters
        return model.adapted.read(folder, model.dtype, model.device)

    def submit(self, cache: KvCache, request: AnswerRequest) -> Cancel:
        sequence = TokenSequence(cache, request)
        self._engine.submit(sequence)
        return partial(self._engine.cancel, sequence)


def make_builtin_engine(
    model: TextModel, kv_bytes: int, settings: EngineSettings, grammar: GrammarSettings
) -> BuiltinEngine:
    """Assemble an engine that ends the worker if its device is lost. Raises OutOfMemory."""
    return BuiltinEngine(make_engine(model, kv_bytes, settings, on_device_lost=exit_worker), grammar)


def make_engine(
    model: TextModel,
    kv_bytes: int,
    settings: EngineSettings,
    on_device_lost: Callable[[], None] = lambda: None,
    *,
    has_graphs: bool = True,
) -> Engine:
    """Assemble the engine as the settings say. has_graphs: see ModelRunner. Raises OutOfMemory."""
    runner = ModelRunner(model, kv_bytes, settings.max_rows, has_graphs=has_graphs)
    scheduler = Scheduler(settings.max_rows, make_pace(settings, on_gpu=model.device.type != "cpu"))
    return Engine(runner, scheduler, settings.num_threads, on_device_lost=on_device_lost)
