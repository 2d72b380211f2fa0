"""The built-in engine behind the interface of engine/contract.py, and its start: device, model and memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from PIL.Image import Image
from torch import Tensor

from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.kv_cache import BlockPool, cache_shape
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
from handlers.errors import InternalError, OutOfMemory, SettingsError
from handlers.models.loader import load_model
from handlers.models.lora import LoraAdapter
from handlers.models.memory import is_out_of_memory
from handlers.models.text import TextModel
from handlers.settings.engine import EngineSettings
from handlers.settings.grammar import GrammarSettings
from handlers.settings.handler import HandlerSettings
from handlers.settings.session import ChatSessionSettings
from handlers.worker.counters import Counters
from handlers.worker.device import choose_device, exit_worker

DEFAULT_CPU_KV_BYTES = 1 << 30
STEP_BYTES = 512 << 20  # of a GPU, for activations, workspaces and graphs; logits are added


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


def open_builtin(settings: HandlerSettings, checkpoint: Path, gpu_id: int | None) -> tuple[TextModel, BuiltinEngine]:
    """Load the model on the device that TorchServe assigned. Raises SettingsError."""
    device = choose_device(gpu_id)
    torch.set_num_threads(settings.engine.num_threads)
    has_adapters = bool(settings.adapters.source)
    try:
        max_rank = settings.adapters.max_rank if has_adapters else 0
        model = load_model(checkpoint, device, settings.model.dtype, max_rank=max_rank)
    except InternalError as exc:
        raise SettingsError(exc.message) from exc  # TorchServe logs it in one line
    try:
        adapter_bytes = settings.adapters.max_bytes if has_adapters else 0
        kv_bytes = choose_kv_bytes(settings.session, model, settings.engine.max_rows, adapter_bytes)
        return model, make_builtin_engine(model, kv_bytes, settings.engine, settings.grammar)
    except OutOfMemory as exc:
        raise SettingsError(f"handler.session: {exc.message}; give it fewer kv_bytes or kv_tokens") from exc


def choose_kv_bytes(settings: ChatSessionSettings, model: TextModel, max_rows: int, adapter_bytes: int = 0) -> int:
    """Return the device memory for keys and values: by the settings, else what is left of this worker's GPU share.

    adapter_bytes: reserved for adapters. Raises SettingsError if nothing is left.
    """
    if settings.kv_bytes:
        return settings.kv_bytes
    if settings.kv_tokens:
        return cache_shape(model).num_bytes(settings.kv_tokens)
    if model.device.type != "cuda":
        return DEFAULT_CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(model.device)
    own = int(total * settings.device_fraction) - torch.cuda.memory_reserved(model.device)
    step = STEP_BYTES + 3 * 4 * max_rows * model.vocabulary  # logits of the graphs, twice the largest's, and of a step
    left = min(own, free) - settings.features_bytes - adapter_bytes - step
    if left <= 0:
        raise SettingsError(
            f"the model, features_bytes and adapters leave nothing of {settings.device_fraction} of this GPU's {total} "
            "bytes for keys and values: raise handler.session.device_fraction, or use a larger GPU or a smaller dtype"
        )
    return left


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
