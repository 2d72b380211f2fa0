"""vLLM's AsyncLLM behind the interface of engine/contract.py.

Requests come from the worker's threads. An event loop on a thread of its own passes them to vLLM, whose scheduler and
model run in other processes, and its outputs back as events.
"""

import asyncio
import logging
import multiprocessing
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL.Image import Image
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import PrometheusStatLogger

from handlers.engine.contract import (
    AnswerRequest,
    Cancel,
    Capabilities,
    EngineNumbers,
    GrammarText,
    KvCache,
    KvParts,
    TokenEvent,
)
from handlers.engine.grammar import GrammarCompiler
from handlers.engine.vllm.event_loop import EventLoopThread
from handlers.engine.vllm.images import VllmImage, make_prompt
from handlers.engine.vllm.parameters import REFUSED
from handlers.engine.vllm.pool import VllmCache, VllmPool
from handlers.engine.vllm.sampling import read_output, to_vllm
from handlers.errors import (
    MODEL_FAILED,
    STOPPING,
    BadImage,
    HandlerError,
    InternalError,
    InvalidRequest,
    ModelBroken,
    TurnTimedOut,
)
from handlers.models.lora import CONFIG, WEIGHTS, AdapterFiles, read_files
from handlers.models.prompt_format import PromptFormat
from handlers.worker.counters import Counters
from handlers.worker.device import exit_worker

logger = logging.getLogger(__name__)
MAX_REASON_CHARS = 500
STOP_TIMEOUT_S = 20.0  # for vLLM's processes to end by themselves


class _RunningAnswer:
    """An answer that vLLM generates. error: why it was cancelled."""

    def __init__(self, request: AnswerRequest, scope: str) -> None:
        self.request = request
        self.scope = scope
        self.task: asyncio.Task[None] | None = None
        self.error: HandlerError = InternalError(STOPPING)


class VllmAdapter:
    """Implements `Adapter`. vLLM may read the files again at any time, so they lie in a folder of their own.

    number: distinguishes it from all others of the engine. on_drop: called with the request.
    """

    def __init__(self, files: AdapterFiles, number: int, on_drop: Callable[[LoRARequest], None]) -> None:
        self.version = files.version
        self.num_bytes = len(files.weights)
        self._folder = TemporaryDirectory(prefix="torchmoor-adapter-")
        (Path(self._folder.name) / CONFIG).write_bytes(files.config)
        (Path(self._folder.name) / WEIGHTS).write_bytes(files.weights)
        self.request = LoRARequest(f"{self.version}-{number}", number, self._folder.name)
        self._on_drop = on_drop

    def drop(self) -> None:
        self._on_drop(self.request)
        self.forget()

    def forget(self) -> None:
        """Delete the files."""
        self.num_bytes = 0
        self._folder.cleanup()


class StepLog(PrometheusStatLogger):
    """Counts steps for the worker's status: vLLM calls `record` on the loop's thread after each step.

    It replaces vLLM's own Prometheus metrics, which take time in each step and are not shown on any page.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        cache = vllm_config.cache_config
        self.pool = VllmPool((cache.num_gpu_blocks or 0) * cache.block_size, _token_bytes(vllm_config))
        self._steps = self._rows = self._queued = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self._steps += 1
        if scheduler_stats is not None:
            self._rows = scheduler_stats.num_running_reqs
            self._queued = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.pool.used_bytes = int(scheduler_stats.kv_cache_usage * self.pool.capacity_bytes)

    def log_engine_initialized(self) -> None: ...

    def record_admission_rejection(self, reason: str) -> None: ...

    def numbers(self) -> EngineNumbers:
        return EngineNumbers(self._steps, self._rows, self._queued)


def _token_bytes(config: VllmConfig) -> int:
    """Return the bytes of a position's keys and values on all devices together."""
    model = config.model_config
    num_layers = model.hf_text_config.num_hidden_layers
    kind = model.dtype.itemsize if config.cache_config.cache_dtype == "auto" else 1
    return int(2 * num_layers * model.get_total_num_kv_heads() * model.get_head_size() * kind)


class VllmEngine:
    """Implements `ChatEngine`.

    max_adapter_bytes: size limit of an adapter's file. on_dead: called when vLLM's processes have failed for good.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        loop: EventLoopThread,
        prompts: PromptFormat,
        grammars: GrammarCompiler,
        counters: Counters,
        steps: StepLog,
        max_adapter_bytes: int,
    ) -> None:
        self._max_adapter_bytes = max_adapter_bytes
        self._adapter_ids = count(1)
        self._llm = llm
        self._loop = loop
        self._prompts = prompts
        self._grammars = grammars
        self.counters = counters
        self._steps = steps
        self.on_dead: Callable[[], None] = exit_worker
        self._is_stopping = False
        self._answers: set[_RunningAnswer] = set()
        self._ids = count()
        self._wakes: set[Callable[[], None]] = set()
        self.pool: VllmPool = steps.pool
        self.kv_parts: KvParts | None = None
        self.capabilities = Capabilities(
            engine="vllm",
            device=str(llm.vllm_config.device_config.device_type),
            max_context=llm.model_config.max_model_len,
            is_packed=True,
            can_resume=False,
            has_grammars=grammars.is_supported,
            has_equal_images=False,
            image_side=None,
            refused=REFUSED,
        )

    def start(self) -> None:
        """Watch vLLM's processes; they run already."""
        self._loop.post(self._watch)

    def _watch(self) -> None:
        self._llm._run_output_handler()  # vLLM itself begins with the first request
        assert self._llm.output_handler is not None
        self._llm.output_handler.add_done_callback(lambda task: self._note_dead())

    def _note_dead(self) -> None:
        """End the worker before its answers, so that the proxy lets another instance give or continue them."""
        if not self._is_stopping:
            logger.critical("vLLM has ended, and so does the worker")
            self.on_dead()

    def stop(self) -> None:
        self._grammars.stop()
        self._loop.run(self._stop())
        self._loop.stop()

    async def _stop(self) -> None:
        self._is_stopping = True
        tasks = [answer.task for answer in self._answers if answer.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        processes = multiprocessing.active_children()
        self._llm.shutdown(timeout=STOP_TIMEOUT_S)
        for process in processes:  # those that were killed have not ended yet
            process.join(STOP_TIMEOUT_S)

    def numbers(self) -> EngineNumbers:
        return self._steps.numbers()

    def encode(self, image: Image) -> VllmImage:
        """Ask vLLM's processor for the number of positions. The image is copied, since its memory is lent."""
        own = image.copy()
        prompt: Any = {
            "prompt_token_ids": [self._prompts.image_token_id],
            "multi_modal_data": {"image": [own]},
        }
        try:
            rendered = self._loop.run(
                self._llm.renderer.process_for_engine_async(prompt, time.time(), skip_mm_cache=True)
            )
        except (ValueError, VLLMClientError) as exc:
            raise BadImage(f"the model cannot read this image: {exc}") from exc
        [placeholder] = rendered["mm_placeholders"]["image"]  # type: ignore[typeddict-item]
        return VllmImage(own, placeholder.length)

    def compile_grammar(self, source: GrammarText) -> GrammarText:
        """Refuse what llguidance refuses, which vLLM uses, too; vLLM compiles the text itself."""
        self._grammars.compile(source)
        return source

    def load_adapter(self, folder: Path) -> VllmAdapter:
        """Let vLLM read a copy of the folder's files. It accepts the layers that it knows how to adapt."""
        files = read_files(folder, self._max_adapter_bytes)
        files.read_config()
        adapter = VllmAdapter(files, next(self._adapter_ids), self._drop_adapter)
        try:
            self._loop.run(self._llm.add_lora(adapter.request))
        except EngineDeadError as exc:
            adapter.forget()
            self._loop.post(self._note_dead)
            raise InternalError("vLLM has failed; the worker starts again") from exc
        except Exception as exc:  # of every kind
            adapter.forget()
            reason = str(exc).replace(adapter.request.lora_path, "its folder")  # a client sees it
            raise ModelBroken(f"vLLM cannot use the adapter: {reason[:MAX_REASON_CHARS]}") from exc
        return adapter

    def _drop_adapter(self, request: LoRARequest) -> None:
        try:
            self._loop.run(self._llm.remove_lora(request.lora_int_id))
        except Exception as exc:  # vLLM has ended
            logger.warning("adapter not removed from vLLM error=%s", exc)

    def submit(self, cache: KvCache, request: AnswerRequest) -> Cancel:
        assert isinstance(cache, VllmCache)
        answer = _RunningAnswer(request, f"{cache.scope} {cache.variant}".rstrip())
        self._loop.post(partial(self._begin, answer))
        return partial(self._cancel_later, answer)

    def _begin(self, answer: _RunningAnswer) -> None:
        self._answers.add(answer)
        answer.task = asyncio.create_task(self._generate(answer))
        answer.task.add_done_callback(partial(self._end, answer))
        if self._is_stopping:
            answer.task.cancel()

    def _cancel_later(self, answer: _RunningAnswer, error: HandlerError) -> None:
        with suppress(InternalError):  # `stop` ends every answer
            self._loop.post(partial(self._cancel, answer, error))

    def _cancel(self, answer: _RunningAnswer, error: HandlerError) -> None:
        if answer in self._answers and answer.task is not None:
            answer.error = error
            answer.task.cancel()

    async def _generate(self, answer: _RunningAnswer) -> None:
        """Generate an answer to its end. The event loop's clock is the monotonic one of deadlines."""
        async with asyncio.timeout_at(answer.request.deadline):
            await self._pass_on(answer)

    async def _pass_on(self, answer: _RunningAnswer) -> None:
        request = answer.request
        prompt: Any = make_prompt(request.prompt, request.images, self._prompts.image_token_id, answer.scope)
        prompt["prompt_token_ids"] += request.given
        rendered = await self._llm.renderer.process_for_engine_async(prompt, time.time())
        params = to_vllm(request.params, len(request.given), self._prompts.eos_token_ids)
        adapter = None
        if request.adapter is not None:
            assert isinstance(request.adapter, VllmAdapter)  # `load_adapter` has returned it
            adapter = request.adapter.request
        stream = self._llm.generate(rendered, params, f"answer-{next(self._ids)}", lora_request=adapter)
        async with aclosing(stream):
            async for output in stream:
                for event in read_output(output, request.params, self._prompts.eos_token_ids):
                    if not request.on_event(event):
                        self._answers.discard(answer)  # so that a cancellation has no effect while vLLM aborts it
                        return
                self._wake_later(request.wake)

    def _wake_later(self, wake: Callable[[], None] | None) -> None:
        """Call `wake` once after all outputs of a step, which arrive in one round of the loop."""
        if wake is None:
            return
        if not self._wakes:
            asyncio.get_running_loop().call_soon(self._wake)
        self._wakes.add(wake)

    def _wake(self) -> None:
        wakes, self._wakes = self._wakes, set()
        for wake in wakes:
            wake()

    def _end(self, answer: _RunningAnswer, task: asyncio.Task[None]) -> None:
        """Pass on why an answer's task failed. A task that is cancelled before it begins runs nothing of its own."""
        error = answer.error if task.cancelled() else self._translate(task.exception())
        is_over = answer not in self._answers
        self._answers.discard(answer)
        if error is None or is_over:
            return
        try:
            answer.request.on_event(TokenEvent(None, error=error))
        except Exception:
            logger.exception("answer could not be ended")

    def _translate(self, error: BaseException | None) -> HandlerError | None:
        if error is None or isinstance(error, HandlerError):
            return error
        if isinstance(error, TimeoutError):
            return TurnTimedOut()
        if isinstance(error, EngineDeadError):
            self._note_dead()
            return InternalError("vLLM has failed; the worker starts again")
        if isinstance(error, VLLMClientError):
            return InvalidRequest(str(error))
        logger.error("answer failed", exc_info=error)
        return InternalError(MODEL_FAILED)
