"""Loads a checkpoint's folder into a model that the engine can run."""

import copy
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from handlers.errors import HandlerError, InternalError, NoMemoryForModel, SettingsError
from handlers.models.declared_size import BuildLimit, check_config
from handlers.models.llava import LlavaModel
from handlers.models.memory import check_fits, is_out_of_memory, read_headers, weight_files
from handlers.models.plain import PlainModel
from handlers.models.processor import Processor
from handlers.models.skeleton import build_skeleton, making_lock
from handlers.models.text import TextModel
from handlers.models.tokenizer import TOKENIZER, load_tokenizer
from handlers.models.transformers_check import TransformersCheck
from torchmoor.wire.progress import MARK, WORKER_INTERVAL_S, reporting

logger = logging.getLogger(__name__)
MAX_NAMED = 3  # weights that an error lists
MAX_REASON_CHARS = 600
# Endings of architectures that have another task than to generate text.
OTHER_TASKS = (
    *("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForQuestionAnswering"),
    "ForImageClassification",
)

# The vision families for which tests show the same answers as in transformers, and whether they cut images into
# patches. Others fail on positions of several dimensions (Qwen2-VL), tokens that see ahead (Gemma 3, PaliGemma), marks
# between an image's tokens (Idefics 3, Pixtral), or features of several layers of the decoder.
SEEING = {"llava": False, "vipllava": False, "llava_next": True, "llava_onevision": True}
WITH_VLLM = "vLLM serves more (handler.engine.name: vllm, docs/gpu.md)"


def load_model(path: Path, device: torch.device, dtype: str, *, max_rank: int = 0) -> TextModel:
    """Load the model in `path` onto `device`.

    dtype: a torch type's name, or "auto": float32 on a CPU, the checkpoint's own type elsewhere.
    max_rank: largest rank of adapters (handlers/models/lora.py); 0: the model has no adapters.
    Reads safetensors weights only, never pickled ones. Raises SettingsError if `path` is not a checkpoint, declares far
    more than its files hold, does not fit the device, or holds a model whose results here would differ from those in
    transformers. If the device has no memory for it, the error is a NoMemoryForModel. Raises InternalError if the
    process that checks its chat template cannot be started.
    """
    if not (path / "config.json").is_file():
        raise SettingsError(f"handler.model.path: there is no config.json in {path}")
    transformers_logging.disable_progress_bar()
    config: Any = None
    try:
        config = json.loads((path / "config.json").read_bytes())
        check_config(config)
        loaded = _load(path, device, dtype)
        if max_rank:
            _accept_adapters(loaded, max_rank)
        return loaded
    except (SettingsError, InternalError):
        raise
    except Exception as exc:  # the libraries raise errors of every kind; TorchServe expects one
        reason = " ".join(str(exc).split())[:MAX_REASON_CHARS].rstrip(".")
        hint = "" if (path / TOKENIZER).is_file() else f"; there is no {TOKENIZER} in it"
        if any(path.glob("*.bin")) and not any(path.glob("*.safetensors")):
            hint += "; pickled weights (.bin) are not read: save it again with save_pretrained"
        if isinstance(config, dict) and config.get("quantization_config"):
            hint += f"; its weights are quantized: {WITH_VLLM}"
        if is_out_of_memory(exc):
            raise NoMemoryForModel(f"{device} has no memory for the checkpoint {path}: {reason}") from exc
        raise SettingsError(f"the checkpoint {path} cannot be used: {type(exc).__name__}: {reason}{hint}") from exc


def _load(path: Path, device: torch.device, dtype: str) -> TextModel:
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    _check_supported(config)
    can_see = hasattr(config, "vision_config")
    kind = choose_type(dtype, device) or (config.dtype if isinstance(config.dtype, torch.dtype) else None)
    check_fits(path, device, kind)
    loader = AutoModelForImageTextToText if can_see else AutoModelForCausalLM
    with making_lock, reporting_weights():
        build_skeleton(copy.deepcopy(config), loader, _build_limit(path))
        loading: Any = loader.from_pretrained(
            path,
            dtype=kind or "auto",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    model, found = loading
    _check_complete(found)
    model = model.to(device).eval().requires_grad_(False)
    logger.info("model loaded type=%s path=%s device=%s dtype=%s", config.model_type, path, device, model.dtype)
    transformers_check = TransformersCheck(model)
    loaded: TextModel
    if can_see:
        image_token_id = getattr(config, "image_token_id", None) or config.image_token_index
        processor = Processor.load(path, image_token_id)
        loaded = LlavaModel(model, processor, has_patches=SEEING[config.model_type])
    else:
        loaded = make_text_model(model, load_tokenizer(path), transformers_check)
    if loaded.is_packed:
        loaded.optimize()
        transformers_check.check(loaded)
    return loaded


def _check_supported(config: Any) -> None:
    """Raise SettingsError if the model does not generate text, or sees or is quantized in an unsupported way."""
    for name in config.architectures or ():
        if name.endswith(OTHER_TASKS):
            raise SettingsError(
                f"a {name} does not generate text: put it into a directory of models, and serve that with torchmoor up "
                "--endpoint many --models DIRECTORY (docs/many-models.md)"
            )
    if hasattr(config, "vision_config") and config.model_type not in SEEING:
        known = ", ".join(SEEING)
        raise SettingsError(
            f"models of type {config.model_type} are not supported; supported vision models: {known}; {WITH_VLLM}"
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization and not AutoHfQuantizer.supports_quant_method(quantization):  # it would be read without its scales
        method = quantization["quant_method"]
        raise SettingsError(f"weights quantized by {method} are not supported; {WITH_VLLM}")


def _check_complete(found: Mapping[str, Any]) -> None:
    """Raise SettingsError unless the files have all of the model's weights: transformers makes up missing ones.

    found: what transformers says about the load.
    """
    missing, other = sorted(found["missing_keys"]), sorted(each[0] for each in found["mismatched_keys"])
    for names, reason in ((missing, "its files lack"), (other, "config.json describes other shapes for")):
        if names:
            listed = ", ".join(names[:MAX_NAMED])
            raise SettingsError(
                f"handler.model.path: the checkpoint is not complete: {reason} {len(names)} of the model's weights "
                f"({listed}); download or save it again"
            )


def _accept_adapters(model: TextModel, max_rank: int) -> None:
    if not model.is_packed:
        raise SettingsError(
            "handler.adapters.source: models that do not run in packed steps have no adapters (docs/checkpoints.md)"
        )
    model.accept_adapters(max_rank)


def make_text_model(model: Any, tokenizer: Any, transformers_check: TransformersCheck) -> TextModel:
    """Prepare a causal LM for the engine: in packed steps if it answers the same in them, else as a PlainModel.

    Raises SettingsError if it answers differently in both.
    """
    attention = model.config._attn_implementation
    packed, difference = _try_packed(model, tokenizer, transformers_check)
    if packed is not None:
        return packed
    plain = _make_plain(model, tokenizer, attention, transformers_check)
    logger.warning(
        "models of type %s do not run in packed steps: the engine computes one sequence at a time, so that with N "
        "answers at a time each takes N times as long (docs/checkpoints.md) reason=%s",
        model.config.model_type,
        difference,
    )
    return plain


def _try_packed(
    model: Any, tokenizer: Any, transformers_check: TransformersCheck
) -> tuple[TextModel | None, str | None]:
    """Return the model for packed steps; None, with the reason, if it does not run in them."""
    try:
        packed = TextModel(model, tokenizer)
        difference = transformers_check.compare(packed, as_rows=False)
    except HandlerError:
        raise
    except Exception as exc:  # each of transformers' families fails in its own way
        if is_out_of_memory(exc):
            raise
        is_known = isinstance(exc, NotImplementedError)
        return None, str(exc) if is_known else "the decoder has other parts than the engine replaces"
    # An error here is the device's, which the model cannot mend.
    difference = difference or transformers_check.compare(packed, as_rows=True)
    return (packed if difference is None else None), difference


def _make_plain(model: Any, tokenizer: Any, attention: str, transformers_check: TransformersCheck) -> PlainModel:
    """Return the model for steps of one sequence. Raises SettingsError if it answers differently in them."""
    try:
        model.set_attn_implementation(attention)
        plain = PlainModel(model, tokenizer)
        transformers_check.check(plain)
        return plain
    except (SettingsError, HandlerError):
        raise
    except Exception as exc:
        if is_out_of_memory(exc):
            raise
        raise SettingsError(
            f"models of type {model.config.model_type} are not supported: with a cache of only keys and values they "
            f"fail ({type(exc).__name__}: {str(exc)[:300]})"
        ) from exc


def _build_limit(path: Path) -> BuildLimit:
    num_bytes = sum(file.stat().st_size for file in weight_files(path))
    return BuildLimit(sum(len(header) for header in read_headers(path)), num_bytes)


def choose_type(dtype: str, device: torch.device) -> torch.dtype | None:
    """Return the type of floats that the settings name, else float32 on a CPU, else None for the checkpoint's own."""
    if dtype != "auto":
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    return torch.float32 if device.type == "cpu" else None


@contextmanager
def reporting_weights() -> Iterator[None]:
    """Log how many weights are loaded, at intervals, in place of transformers' own progress bar."""
    done, total = 0, 0

    def count(factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        nonlocal done, total
        if options.get("desc") != "Loading weights":
            return factory(*arguments, **options)
        done, total = 0, len(arguments[0])
        return counted(arguments[0])

    def counted(weights: Iterable[Any]) -> Iterator[Any]:
        nonlocal done
        for weight in weights:
            yield weight
            done += 1

    def report(line: str) -> None:
        if total:
            logger.info("%s%s", MARK, line)

    previous = transformers_logging.set_tqdm_hook(count)
    try:
        with reporting(lambda: f"loading {done} of {total} weights", report, WORKER_INTERVAL_S):
            yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
