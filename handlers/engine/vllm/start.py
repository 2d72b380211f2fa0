"""The start of vLLM: its variables, its arguments, and its processes."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoProcessor, GenerationConfig

from handlers.errors import SettingsError
from handlers.models.memory import read_headers
from handlers.models.processor import Processor
from handlers.models.prompt_format import PromptFormat
from handlers.models.tokenizer import load_tokenizer
from handlers.settings.group import GIB
from handlers.settings.handler import HandlerSettings
from handlers.worker.counters import Counters
from torchmoor.wire.sampling_parameters import TOP_TOKENS

logger = logging.getLogger(__name__)
LOGGING = Path(__file__).with_name("logging.json")  # without the requests that vLLM would log when a step fails
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 256 << 20  # vLLM's queue between its processes takes 160 MiB
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM accepts as its limit
CPU_LORAS = 64  # adapters that vLLM keeps in the host's memory; it reads others again when they are used


def _find_rank(settings: HandlerSettings) -> int:
    """Return vLLM's smallest limit of ranks that suffices. Raises SettingsError."""
    max_rank = settings.adapters.max_rank
    if max_rank > LORA_RANKS[-1]:
        raise SettingsError(f"handler.adapters.max_rank must be at most {LORA_RANKS[-1]} with vLLM, not {max_rank}")
    return next(rank for rank in LORA_RANKS if rank >= max_rank)


Value = Callable[[HandlerSettings], Any]
# By engine argument of vLLM: the setting that it follows, empty if the handler needs its own value; and the value, None
# to leave the argument to vLLM.
ARGUMENTS: dict[str, tuple[str, Value]] = {
    "model": ("model.path", lambda own: own.model.path),
    "dtype": ("model.dtype", lambda own: own.model.dtype),
    "max_num_seqs": ("engine.max_rows", lambda own: own.engine.max_rows),
    "tensor_parallel_size": ("model.tensor_parallel", lambda own: own.model.tensor_parallel),
    "pipeline_parallel_size": ("vllm.pipeline_parallel", lambda own: own.vllm.pipeline_parallel),
    "enforce_eager": ("vllm.enforce_eager", lambda own: own.vllm.enforce_eager),
    "enable_prefix_caching": ("", lambda own: True),
    "gpu_memory_utilization": ("session.device_fraction", lambda own: own.session.device_fraction),
    "limit_mm_per_prompt": ("session.max_images", lambda own: {"image": own.session.max_images}),
    "structured_outputs_config": ("", lambda own: {"backend": "guidance"}),
    "max_logprobs": ("", lambda own: TOP_TOKENS.most),
    "enable_log_requests": ("", lambda own: False),
    "disable_log_stats": ("", lambda own: True),
    "kv_cache_memory_bytes": ("session.kv_bytes", lambda own: own.session.kv_bytes or None),
    "max_model_len": ("engine.max_context_tokens", lambda own: own.engine.max_context_tokens or None),
    "quantization": ("vllm.quantization", lambda own: own.vllm.quantization or None),
    "kv_offloading_size": ("vllm.kv_offload_bytes", lambda own: own.vllm.kv_offload_bytes / GIB or None),
    "speculative_config": ("vllm.speculative", lambda own: dict(own.vllm.speculative) or None),
    "enable_lora": ("adapters.source", lambda own: True if own.adapters.source else None),
    "max_loras": ("vllm.max_loras", lambda own: own.vllm.max_loras if own.adapters.source else None),
    "max_cpu_loras": (
        "vllm.max_loras",
        lambda own: max(own.vllm.max_loras, CPU_LORAS) if own.adapters.source else None,
    ),
    "max_lora_rank": ("adapters.max_rank", lambda own: _find_rank(own) if own.adapters.source else None),
}


def open_vllm(settings: HandlerSettings, checkpoint: Path, gpu_id: int | None) -> tuple[PromptFormat, Any]:
    """Start vLLM on the GPUs that TorchServe assigned, or on the CPU; return the checkpoint's prompts and the engine.

    It takes a minute or more. Raises SettingsError.
    """
    prepare_environment(settings, gpu_id, os.environ)
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as exc:
        raise SettingsError(
            f"handler.engine.name is vllm, but this Python cannot import it ({exc}): run TorchServe by an environment "
            "that has vLLM, with torchmoor up --python (docs/gpu.md)"
        ) from exc
    from handlers.engine.grammar import GrammarCompiler
    from handlers.engine.vllm.engine import StepLog, VllmEngine
    from handlers.engine.vllm.event_loop import EventLoopThread

    arguments = make_arguments(settings, checkpoint)
    unknown = set(arguments) - {each.name for each in fields(AsyncEngineArgs)}
    if unknown:
        raise SettingsError(f"handler.vllm.options: this vLLM has no option {', '.join(sorted(unknown))}")
    engine_arguments = AsyncEngineArgs(**arguments)

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(engine_arguments, stat_loggers=[StepLog])

    loop = EventLoopThread()
    try:
        prompts = read_prompts(checkpoint, arguments)
        if gpu_id is None:
            _check_attention(engine_arguments.create_model_config())
        llm = loop.run(start())
    except Exception as exc:  # vLLM's errors are of every kind; TorchServe expects one
        loop.stop()
        raise SettingsError(f"vLLM cannot serve {checkpoint}: {type(exc).__name__}: {exc}{_memory_hint()}") from exc
    prompts.max_context = llm.model_config.max_model_len
    counters = Counters()
    grammars = GrammarCompiler(prompts.tokenizer, prompts.eos_token_ids, prompts.vocabulary, settings.grammar, counters)
    assert llm.logger_manager is not None
    [steps] = (each for each in llm.logger_manager.stat_loggers if isinstance(each, StepLog))
    max_adapter_bytes = settings.adapters.max_bytes
    return prompts, VllmEngine(llm, loop, prompts, grammars, counters, steps, max_adapter_bytes)


def _memory_hint() -> str:
    """Return advice if the memory that vLLM's processes share is as small as a container's by default."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else MIN_SHARED_BYTES
    if free >= MIN_SHARED_BYTES:
        return ""
    return (
        f" {free >> 20} MiB are free in {SHARED_MEMORY}, which vLLM's processes share: give a container --shm-size 1g, "
        "a pod an emptyDir of medium Memory there"
    )


def prepare_environment(settings: HandlerSettings, gpu_id: int | None, environ: Any) -> None:
    """Set what vLLM reads from the environment when it is imported; what operators have set stays."""
    if not environ.keys() & {"VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH"}:
        environ["VLLM_LOGGING_CONFIG_PATH"] = str(LOGGING)
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # otherwise vLLM sends usage statistics
    environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # the worker has threads already
    if gpu_id is None:
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environ["OMP_NUM_THREADS"] = str(settings.engine.num_threads)
    elif settings.model.tensor_parallel * settings.vllm.pipeline_parallel == 1:
        visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        environ["CUDA_VISIBLE_DEVICES"] = visible[gpu_id] if visible[gpu_id:] and visible[gpu_id] else str(gpu_id)


def make_arguments(settings: HandlerSettings, checkpoint: Path) -> dict[str, Any]:
    """Return vLLM's engine arguments."""
    values = {name: value(settings) for name, (_, value) in ARGUMENTS.items()}
    values["model"] = str(checkpoint)  # where it has been downloaded to
    arguments = {name: value for name, value in values.items() if value is not None}
    options = settings.vllm.options
    taken = options.keys() & arguments.keys()
    if taken:
        problems = [_refuse_option(name) for name in sorted(taken)]
        raise SettingsError(f"handler.vllm.options: {'; '.join(problems)}")
    return {**arguments, **options}


def _refuse_option(name: str) -> str:
    setting, _ = ARGUMENTS[name]
    if setting:
        return f"handler.{setting} sets {name}"
    return f"{name} cannot be set, because the handler needs its own value"


def _check_attention(config: Any) -> None:
    """Raise for models that vLLM's attention on a CPU computes wrongly, without an error. config: vLLM's."""
    if config.is_mm_prefix_lm:
        raise ValueError(
            f"in models of type {config.hf_config.model_type}, an image's tokens attend to each other, which vLLM "
            "does not compute on a CPU; such a model needs a GPU"
        )


def read_prompts(checkpoint: Path, arguments: Mapping[str, Any]) -> PromptFormat:
    """Read how the checkpoint's prompts are written."""
    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    generation = None
    if (checkpoint / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(checkpoint, local_files_only=True)
    if hasattr(config, "vision_config"):
        # Templates write this token for an image; the config names the one at its positions, which may be another.
        own = AutoProcessor.from_pretrained(checkpoint, local_files_only=True)
        processor = Processor.load(checkpoint, own.tokenizer.convert_tokens_to_ids(own.image_token))
        prompts = PromptFormat(config, generation, processor.tokenizer, processor)
    else:
        prompts = PromptFormat(config, generation, load_tokenizer(checkpoint))
    prompts.vocabulary = config.get_text_config().vocab_size
    prompts.fingerprint = _fingerprint(checkpoint, arguments)
    return prompts


def _fingerprint(checkpoint: Path, arguments: Mapping[str, Any]) -> str:
    """Return a name that depends on the weight files' headers and on the arguments that change results.

    Of the handler's own arguments these are the types of the weights, and speculation, which draws other numbers. Any
    of the operator's options may change results, such as the type of the KV cache.
    """
    options = {name: value for name, value in arguments.items() if name not in ARGUMENTS}
    results = [options, *(arguments.get(name) for name in ("dtype", "quantization", "speculative_config"))]
    digest = hashlib.blake2b((checkpoint / "config.json").read_bytes(), digest_size=16)
    digest.update(repr(read_headers(checkpoint)).encode())
    digest.update(json.dumps(results, sort_keys=True).encode())
    return digest.hexdigest()
