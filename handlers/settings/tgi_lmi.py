"""Settings from the variables and serving.properties of the containers of TGI and LMI (DJL Serving).

An endpoint that ran one of those containers keeps its environment and its serving.properties. Later sources win: the
archive's model-config, a checkpoint in /opt/ml/model, the environment, serving.properties (LMI's own order), and
TORCHMOOR_HANDLER_*, which handler.py reads. An unsupported setting that would change answers is refused; one that only
tunes another engine is ignored and logged.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handlers.errors import SettingsError
from handlers.settings.engine import GPU_CHUNK
from handlers.settings.pump import PumpSettings
from torchmoor.wire.checkpoint_places import PROPERTIES, read_model_id
from torchmoor.wire.handler_variables import ADAPTERS_SOURCE, ENGINE_NAME, ENV_PREFIX

logger = logging.getLogger(__name__)

SAGEMAKER_MODEL = Path("/opt/ml/model")
MAX_PROPERTIES_BYTES = 1 << 20
_PREFIX = "option."
_DTYPES = {
    "auto": "auto",
    **dict.fromkeys(("fp32", "float32"), "float32"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
}
_OFF = ("", "false", "none", "0", "disable")
_FORMATS = {"json": "lmi-json", "jsonlines": "lmi", "sse": "tgi", "tgi": "tgi"}


def _whole(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise ValueError("it must be a positive number")
    return number


def _degree(text: str) -> int:
    """Return the number of devices of a model; SageMaker sets 0 without a GPU."""
    if text.lower() in ("max", "all"):
        raise ValueError("say a number of GPUs")
    return max(1, int(text))


def _quantization(text: str) -> str:
    """Return vLLM's name of the form of the weights, empty if there is none. Its words for bitsandbytes are TGI's."""
    word = text.lower()
    if word in _OFF:
        return ""
    return "bitsandbytes" if word.startswith("bitsandbytes") else word


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it must be a JSON object")
    return value


def _one_of(values: Mapping[str, str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError(f"known are {', '.join(values)}")
        return values[text.lower()]

    return parse


def _off(text: str) -> None:
    if text.lower() not in _OFF:
        raise ValueError("it would change the model's answers, and torchmoor does not support it; remove it")


def _off_without_source(text: str) -> None:
    """Refuse to switch adapters on without a source. Called only if no source is set."""
    if text.lower() not in _OFF:
        raise ValueError(f"name the adapters' folder in {ADAPTERS_SOURCE} (docs/adapters.md)")


@dataclass(frozen=True, slots=True)
class ForeignSetting:
    """One setting of these containers: its names, the handler's setting that it becomes, and how to parse it."""

    setting: str | None  # group.key; None: only checked
    parse: Callable[[str], Any]
    variables: Sequence[str]  # of TGI's container
    options: Sequence[str] = ()  # of LMI: option.NAME in serving.properties, OPTION_NAME in the environment

    @property
    def own_variable(self) -> str:
        """Return the variable of the handler's setting, which wins over these."""
        return f"{ENV_PREFIX}{(self.setting or '').replace('.', '_').upper()}"


FOREIGN = (
    ForeignSetting("model.path", read_model_id, ("HF_MODEL_ID",), ("model_id",)),
    ForeignSetting("model.revision", str, ("HF_MODEL_REVISION", "REVISION"), ("revision",)),
    ForeignSetting("model.dtype", _one_of(_DTYPES), ("DTYPE",), ("dtype",)),
    ForeignSetting("model.tensor_parallel", _degree, ("SM_NUM_GPUS", "NUM_SHARD"), ("tensor_parallel_degree",)),
    ForeignSetting("engine.max_prompt_tokens", _whole, ("MAX_INPUT_LENGTH", "MAX_INPUT_TOKENS")),
    ForeignSetting("engine.max_context_tokens", _whole, ("MAX_TOTAL_TOKENS",), ("max_model_len",)),
    ForeignSetting("engine.max_rows", _whole, ("MAX_BATCH_SIZE",), ("max_rolling_batch_size",)),
    ForeignSetting(
        "engine.prefill_chunk", _whole, ("MAX_BATCH_PREFILL_TOKENS",), ("max_rolling_batch_prefill_tokens",)
    ),
    ForeignSetting("session.kv_tokens", _whole, ("MAX_BATCH_TOTAL_TOKENS",)),
    ForeignSetting("pump.max_in_flight", _whole, ("MAX_CONCURRENT_REQUESTS",)),
    ForeignSetting("request.inputs_form", _one_of(_FORMATS), (), ("output_formatter",)),
    ForeignSetting("vllm.pipeline_parallel", _whole, (), ("pipeline_parallel_degree",)),
    ForeignSetting("vllm.quantization", _quantization, ("QUANTIZE", "HF_MODEL_QUANTIZE"), ("quantize",)),
    ForeignSetting("vllm.speculative", _json, (), ("speculative_config",)),
    ForeignSetting(None, _off, ("TRUST_REMOTE_CODE", "HF_MODEL_TRUST_REMOTE_CODE"), ("trust_remote_code",)),
    ForeignSetting("adapters.source", _off_without_source, (), ("enable_lora",)),
    ForeignSetting("adapters.max_rank", _whole, (), ("max_lora_rank",)),
    ForeignSetting("vllm.max_loras", _whole, (), ("max_loras",)),
    ForeignSetting(None, _off, ("LORA_ADAPTERS",), ("adapters",)),
    ForeignSetting(None, _off, ("ROPE_SCALING",), ("rope_scaling",)),
)


_NOT_OF_VLLM = {
    "session.kv_tokens": "vLLM sizes its KV cache by bytes",
    "engine.prefill_chunk": "vLLM has max_num_batched_tokens in handler.vllm.options",
}


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and the variable or option that it comes from."""

    name: str
    value: Any


def apply_foreign_settings(
    config: Mapping[str, Any], environ: Mapping[str, str], folders: Sequence[Path]
) -> dict[str, dict[str, Any]]:
    """Return the model-config's `handler:` group, overridden by the settings of these containers.

    folders: searched for serving.properties; the first one found is used.
    Raises SettingsError, naming the variable or option, on a value that is malformed, contradicts another, or asks for
    what is not offered.
    """
    settings = _find_settings(config, environ, folders)
    _check_lengths(settings)
    if (environ.get(ENGINE_NAME) or _own_value(config, "engine", "name")) != "vllm":
        settings.pop("vllm.max_loras", None)  # the built-in engine has no such limit
        _check_built_in(settings)
        _drop_large_chunk(settings)
    else:
        for setting, reason in _NOT_OF_VLLM.items():
            if setting in settings:
                logger.warning("setting ignored, %s name=%s", reason, settings.pop(setting).name)
    return _merge(config, settings)


def _find_settings(config: Mapping[str, Any], environ: Mapping[str, str], folders: Sequence[Path]) -> dict[str, _Given]:
    """Return the handler's settings that variables, options or a file give, unless its own variable sets them."""
    properties, options = _read_properties(folders), _read_options(environ)
    known = {option for foreign in FOREIGN for option in foreign.options}
    for option, given in [*properties.items(), *options.items()]:
        if option not in known:
            logger.warning("option ignored, it is not known here name=%s", given.name)
    settings: dict[str, _Given] = {}
    if (SAGEMAKER_MODEL / "config.json").is_file():
        settings["model.path"] = _Given(str(SAGEMAKER_MODEL), str(SAGEMAKER_MODEL))
    has_source = bool(_own_value(config, "adapters", "source"))
    for foreign in FOREIGN:
        if foreign.own_variable in environ or (foreign.setting == "adapters.source" and has_source):
            continue
        variables = [_Given(name, environ[name]) for name in foreign.variables if environ.get(name, "").strip()]
        in_environment = [*variables, *(options[name] for name in foreign.options if name in options)]
        in_file = [properties[name] for name in foreign.options if name in properties]
        found = _agreed(foreign, in_file) or _agreed(foreign, in_environment)
        if found is not None and foreign.setting is not None and found.value:
            settings[foreign.setting] = found
    return settings


def _own_value(config: Mapping[str, Any], group: str, key: str) -> object:
    """Return a value of the model-config, which settings.py checks; None without it."""
    own = config.get(group)
    return own.get(key) if isinstance(own, Mapping) else None


def _check_built_in(settings: Mapping[str, _Given]) -> None:
    """Raise SettingsError for what only vLLM offers."""
    for setting, given in settings.items():
        if setting.startswith("vllm.") and given.value != 1:
            raise SettingsError(
                f"{given.name} is {given.value!r}, which is not offered by the built-in engine: set "
                "handler.engine.name to vllm (docs/gpu.md)"
            )


def _drop_large_chunk(settings: dict[str, _Given]) -> None:
    """Drop a limit that does not shorten a step on a GPU.

    Those containers, unless they split prompts, compute one in one step, so their limit must hold the longest one; a
    step here need not.
    """
    chunk = settings.get("engine.prefill_chunk")
    if chunk is not None and chunk.value >= GPU_CHUNK:
        del settings["engine.prefill_chunk"]
        logger.info("setting ignored, steps are shorter name=%s", chunk.name)


def _merge(config: Mapping[str, Any], settings: Mapping[str, _Given]) -> dict[str, dict[str, Any]]:
    merged = {group: dict(values) if isinstance(values, Mapping) else values for group, values in config.items()}
    for setting, given in settings.items():
        group, _, key = setting.partition(".")
        own = merged.setdefault(group, {})
        if not isinstance(own, dict):
            continue  # load_settings reports it
        if setting == "pump.max_in_flight":
            given = _within_the_batch(given, own)
        own[key] = given.value
        logger.info("setting taken setting=handler.%s from=%s", setting, given.name)
    return merged


def _agreed(foreign: ForeignSetting, given: Sequence[_Given]) -> _Given | None:
    """Return the value that one source gives a setting under all of its names. Raises SettingsError if they differ."""
    read = [_parse(foreign, each) for each in given]
    for other in read[1:]:
        if other.value != read[0].value:
            raise SettingsError(f"{read[0].name} and {other.name} say different things; give one of them")
    return read[0] if read else None


def _parse(foreign: ForeignSetting, given: _Given) -> _Given:
    try:
        return _Given(given.name, foreign.parse(given.value.strip()))
    except ValueError as exc:
        raise SettingsError(f"{given.name} is {given.value!r}: {exc}") from exc


def _read_options(environ: Mapping[str, str]) -> dict[str, _Given]:
    """Return LMI's options in the environment by their names without the prefix."""
    return {
        name.removeprefix("OPTION_").lower(): _Given(name, value)
        for name, value in environ.items()
        if name.startswith("OPTION_") and value.strip()
    }


def _read_properties(folders: Sequence[Path]) -> dict[str, _Given]:
    """Return the options of the first serving.properties found; its other lines configure DJL's workers."""
    for folder in folders:
        path = folder / PROPERTIES
        if not path.is_file():
            continue
        if path.stat().st_size > MAX_PROPERTIES_BYTES:
            raise SettingsError(f"{path} is larger than {MAX_PROPERTIES_BYTES} bytes")
        found = {}
        for line in path.read_text("utf-8-sig", errors="replace").splitlines():
            if not line.strip() or line.lstrip().startswith(("#", "!")):
                continue
            name, separator, value = line.partition("=")
            if not separator:
                raise SettingsError(f"{path} has a line without an equals sign: {line.strip()[:100]!r}")
            if name.strip().startswith(_PREFIX) and value.strip():
                option = name.strip().removeprefix(_PREFIX)
                found[option] = _Given(f"{_PREFIX}{option} of {path}", value.strip())
        return found
    return {}


def _check_lengths(settings: Mapping[str, _Given]) -> None:
    prompt, context = settings.get("engine.max_prompt_tokens"), settings.get("engine.max_context_tokens")
    if prompt and context and prompt.value >= context.value:
        raise SettingsError(
            f"{prompt.name} ({prompt.value}) must be less than {context.name} ({context.value}), which counts the "
            "answer too"
        )


def _within_the_batch(given: _Given, pump: Mapping[str, Any]) -> _Given:
    """Limit max_in_flight to the archive's own, which suits its batchSize."""
    limit = pump.get("max_in_flight", PumpSettings().max_in_flight)
    if not isinstance(limit, int) or given.value <= limit:
        return given
    logger.warning("limit lowered to what the archive carries name=%s from=%d to=%d", given.name, given.value, limit)
    return _Given(given.name, limit)
