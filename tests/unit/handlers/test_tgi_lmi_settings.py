"""The environment and serving.properties of other containers, translated into our settings."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from handlers.engine.builtin.pace import make_pace
from handlers.errors import SettingsError
from handlers.settings import tgi_lmi as tgi_lmi_settings
from handlers.settings.handler import HandlerSettings, load_settings
from handlers.settings.tgi_lmi import apply_foreign_settings
from handlers.settings.vllm import VllmSettings


@pytest.fixture(autouse=True)
def sagemaker_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a replacement for /opt/ml/model, without the folder itself."""
    folder = tmp_path / "opt-ml-model"
    monkeypatch.setattr(tgi_lmi_settings, "SAGEMAKER_MODEL", folder)
    return folder


def settings(
    environ: Mapping[str, str], folder: Path | None = None, config: Mapping[str, Any] | None = None
) -> HandlerSettings:
    folders = [] if folder is None else [folder]
    return load_settings(apply_foreign_settings(config or {}, environ, folders), environ)


def properties(folder: Path, *lines: str) -> Path:
    (folder / "serving.properties").write_text("\n".join(lines))
    return folder


def test_the_environment_of_tgi_is_understood() -> None:
    """Every variable of a usual SageMaker TGI endpoint is accepted."""
    found = settings(
        {
            "HF_MODEL_ID": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "HF_MODEL_REVISION": "main",
            "SM_NUM_GPUS": "1",
            "MAX_INPUT_LENGTH": "1024",
            "MAX_TOTAL_TOKENS": "2048",
            "MAX_BATCH_TOTAL_TOKENS": "8192",
            "MAX_CONCURRENT_REQUESTS": "64",
            "DTYPE": "bfloat16",
            "QUANTIZE": "",
            "TRUST_REMOTE_CODE": "false",
        }
    )

    assert found.model.path == "hf://HuggingFaceTB/SmolLM2-135M-Instruct"
    assert found.model.revision == "main"
    assert found.model.dtype == "bfloat16"
    assert (found.engine.max_prompt_tokens, found.engine.max_context_tokens) == (1024, 2048)
    assert found.session.kv_tokens == 8192
    assert found.pump.max_in_flight == 64


def test_serving_properties_are_understood(tmp_path: Path) -> None:
    """LMI's properties are accepted; comments, other keys and blank lines are skipped."""
    folder = properties(
        tmp_path,
        "# made by a notebook",
        "engine=Python",
        "",
        "option.model_id = s3://bucket/llama/",
        "option.dtype=fp16",
        "option.max_model_len=4096",
        "option.max_rolling_batch_size=16",
        "option.tensor_parallel_degree=1",
    )

    found = settings({}, folder)

    assert found.model.path == "s3://bucket/llama/"
    assert found.model.dtype == "float16"
    assert found.engine.max_context_tokens == 4096
    assert found.engine.max_rows == 16


def test_the_first_line_counts_behind_a_byte_order_mark(tmp_path: Path) -> None:
    """Some editors begin a file with a byte order mark."""
    assert settings({}, properties(tmp_path, "\ufeffoption.model_id=/models/x")).model.path == "/models/x"


def test_options_of_the_environment_are_understood() -> None:
    """LMI's environment variables are accepted."""
    found = settings({"OPTION_MODEL_ID": "/opt/weights", "OPTION_MAX_ROLLING_BATCH_SIZE": "8"})

    assert found.model.path == "/opt/weights"
    assert found.engine.max_rows == 8


@pytest.mark.parametrize("name", ["MAX_BATCH_PREFILL_TOKENS", "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS"])
def test_prompt_tokens_of_a_step_are_limited(name: str) -> None:
    """A limit that does not shorten a step on a GPU is ignored: it only admits the longest prompt."""

    def chunk(value: str, *, on_gpu: bool) -> int:
        return make_pace(settings({name: value}).engine, on_gpu=on_gpu).chunk(0)

    assert [chunk("300", on_gpu=on_gpu) for on_gpu in (True, False)] == [300, 300]
    assert [chunk("16000", on_gpu=on_gpu) for on_gpu in (True, False)] == [2048, 512]


@pytest.mark.parametrize(("formatter", "form"), [("jsonlines", "lmi"), ("json", "lmi-json"), ("sse", "tgi")])
def test_the_streams_form_is_lmis_where_lmi_is_configured(tmp_path: Path, formatter: str, form: str) -> None:
    """option.output_formatter selects the form of answers to `inputs`."""
    found = apply_foreign_settings({}, {}, [properties(tmp_path, f"option.output_formatter={formatter}")])

    assert found["request"]["inputs_form"] == form


def test_the_stronger_source_wins(tmp_path: Path, sagemaker_model: Path) -> None:
    """The order is ours, serving.properties, the environment, /opt/ml/model, the archive's model-config."""
    config = {"model": {"path": "model", "dtype": "float32"}}
    environ = {"HF_MODEL_ID": "/from/environment"}
    folder = properties(tmp_path, "option.model_id=/from/properties")
    own = {"TORCHMOOR_HANDLER_MODEL_PATH": "/from/ours"}

    assert settings({}, config=config).model.path == "model"
    sagemaker_model.mkdir()
    assert settings({}, config=config).model.path == "model"
    (sagemaker_model / "config.json").touch()
    assert settings({}, config=config).model.path == str(sagemaker_model)
    assert settings(environ, config=config).model.path == "/from/environment"
    assert settings(environ, folder, config).model.path == "/from/properties"
    assert settings({**environ, **own}, folder, config).model.path == "/from/ours"
    assert settings(environ, folder, config).model.dtype == "float32"


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"MAX_INPUT_LENGTH": "many"}, "MAX_INPUT_LENGTH"),
        ({"MAX_INPUT_LENGTH": "0"}, "MAX_INPUT_LENGTH"),
        ({"MAX_TOTAL_TOKENS": "-5"}, "MAX_TOTAL_TOKENS"),
        ({"MAX_BATCH_TOTAL_TOKENS": "1e6"}, "MAX_BATCH_TOTAL_TOKENS"),
        ({"DTYPE": "int8"}, "DTYPE"),
        ({"SM_NUM_GPUS": "two"}, "SM_NUM_GPUS"),
        ({"OPTION_TENSOR_PARALLEL_DEGREE": "max"}, "OPTION_TENSOR_PARALLEL_DEGREE"),
        ({"OPTION_OUTPUT_FORMATTER": "xml"}, "OPTION_OUTPUT_FORMATTER"),
    ],
)
def test_a_malformed_value_names_its_variable(environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        settings(environ)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"MAX_INPUT_LENGTH": "100", "MAX_INPUT_TOKENS": "200"}, "MAX_INPUT_TOKENS"),
        ({"MAX_INPUT_LENGTH": "2048", "MAX_TOTAL_TOKENS": "2048"}, "MAX_TOTAL_TOKENS"),
        ({"SM_NUM_GPUS": "1", "NUM_SHARD": "2"}, "NUM_SHARD"),
        ({"HF_MODEL_ID": "a/b", "OPTION_MODEL_ID": "c/d"}, "OPTION_MODEL_ID"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], named: str) -> None:
    """Two names for one setting must agree, and an answer needs at least one token."""
    with pytest.raises(SettingsError, match=named):
        settings(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"QUANTIZE": "bitsandbytes"},
        {"TRUST_REMOTE_CODE": "true"},
        {"LORA_ADAPTERS": "sql=/adapters/sql"},
        {"OPTION_ADAPTERS": "adapters"},
        {"OPTION_QUANTIZE": "awq"},
    ],
)
def test_what_would_change_answers_is_refused(environ: dict[str, str]) -> None:
    """Settings that would change answers are refused instead of ignored."""
    (name,) = environ

    with pytest.raises(SettingsError, match=f"{name}.*(is not offered|does not support)"):
        settings(environ)


def test_adapters_of_lmi_need_their_source() -> None:
    """LMI's switch goes with the folder's name; its limits become ours, or vLLM's."""
    lmi = {"OPTION_ENABLE_LORA": "true", "OPTION_MAX_LORA_RANK": "16", "OPTION_MAX_LORAS": "3"}
    with pytest.raises(SettingsError, match=r"OPTION_ENABLE_LORA.*TORCHMOOR_HANDLER_ADAPTERS_SOURCE"):
        settings(lmi)
    found = settings({**lmi, "TORCHMOOR_HANDLER_ADAPTERS_SOURCE": "/adapters"})
    assert (found.adapters.source, found.adapters.max_rank) == ("/adapters", 16)
    assert found.vllm.max_loras == VllmSettings().max_loras
    own = {"TORCHMOOR_HANDLER_ADAPTERS_SOURCE": "/adapters", "TORCHMOOR_HANDLER_ENGINE_NAME": "vllm"}
    assert settings({**lmi, **own}).vllm.max_loras == 3
    assert settings({"OPTION_ENABLE_LORA": "false"}).adapters.source == ""
    assert settings(lmi, config={"adapters": {"source": "/own"}}).adapters.source == "/own"


@pytest.mark.parametrize("environ", [{"SM_NUM_GPUS": "4"}, {"NUM_SHARD": "2"}, {"OPTION_TENSOR_PARALLEL_DEGREE": "8"}])
def test_several_devices_for_one_model_are_refused(environ: dict[str, str]) -> None:
    """The error says what to do instead."""
    with pytest.raises(SettingsError, match="one instance per GPU"):
        settings(environ)


@pytest.mark.parametrize(
    ("environ", "group", "key", "value"),
    [
        ({"SM_NUM_GPUS": "4"}, "model", "tensor_parallel", 4),
        ({"OPTION_TENSOR_PARALLEL_DEGREE": "8"}, "model", "tensor_parallel", 8),
        ({"OPTION_PIPELINE_PARALLEL_DEGREE": "2"}, "vllm", "pipeline_parallel", 2),
        ({"QUANTIZE": "bitsandbytes-nf4"}, "vllm", "quantization", "bitsandbytes"),
        ({"HF_MODEL_QUANTIZE": "AWQ"}, "vllm", "quantization", "awq"),
        ({"OPTION_QUANTIZE": "fp8"}, "vllm", "quantization", "fp8"),
        ({"OPTION_SPECULATIVE_CONFIG": '{"method": "ngram"}'}, "vllm", "speculative", {"method": "ngram"}),
        ({"MAX_TOTAL_TOKENS": "4096"}, "engine", "max_context_tokens", 4096),
    ],
)
def test_vllm_takes_what_the_built_in_engine_refuses(environ: dict[str, str], group: str, key: str, value: Any) -> None:
    """With the engine vllm, variables that the built-in engine refuses are accepted as vLLM's settings."""
    found = settings({**environ, "TORCHMOOR_HANDLER_ENGINE_NAME": "vllm"})

    assert getattr(getattr(found, group), key) == value
    assert settings({**environ}, config={"engine": {"name": "vllm"}}).engine.name == "vllm"


@pytest.mark.parametrize("chunk", ["512", "4096"])
def test_a_limit_that_vllm_does_not_have_is_ignored_aloud(caplog: pytest.LogCaptureFixture, chunk: str) -> None:
    """A container of TGI keeps its variables when its engine becomes vLLM. A setting of the handler is refused."""
    environ = {
        "MAX_BATCH_TOTAL_TOKENS": "8192",
        "MAX_BATCH_PREFILL_TOKENS": chunk,
        "TORCHMOOR_HANDLER_ENGINE_NAME": "vllm",
    }

    found = settings(environ)
    assert (found.session.kv_tokens, found.engine.prefill_chunk) == (0, 0)
    assert "name=MAX_BATCH_TOTAL_TOKENS" in caplog.text
    assert "name=MAX_BATCH_PREFILL_TOKENS" in caplog.text
    with pytest.raises(SettingsError, match=r"session\.kv_tokens is not offered by the engine vllm"):
        settings(environ, config={"session": {"kv_tokens": 8192}})


def test_a_machine_without_gpus_says_zero() -> None:
    """SageMaker sets the number of GPUs to 0 on a CPU instance."""
    assert settings({"SM_NUM_GPUS": "0"}).model.tensor_parallel == 1


def test_unknown_options_are_ignored_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Settings of other engines are ignored, and the log names them."""
    folder = properties(tmp_path, "option.rolling_batch=vllm", "option.model_id=/weights")

    with caplog.at_level(logging.WARNING, logger="handlers.settings.tgi_lmi"):
        found = settings({"OPTION_GPU_MEMORY_UTILIZATION": "0.9"}, folder)

    assert found.model.path == "/weights"
    assert "option.rolling_batch" in caplog.text
    assert "OPTION_GPU_MEMORY_UTILIZATION" in caplog.text
    assert "model_id" not in caplog.text


def test_more_requests_than_the_archive_carries_are_not_let_in(caplog: pytest.LogCaptureFixture) -> None:
    """A limit above the archive's batchSize is lowered to it, with a log message."""
    found = settings({"MAX_CONCURRENT_REQUESTS": "512"}, config={"pump": {"max_in_flight": 112}})

    assert found.pump.max_in_flight == 112
    assert "MAX_CONCURRENT_REQUESTS" in caplog.text


def test_properties_that_cannot_be_read_name_the_line(tmp_path: Path) -> None:
    """The error names the line that is not an assignment."""
    with pytest.raises(SettingsError, match="max_model_len 4096"):
        settings({}, properties(tmp_path, "option.max_model_len 4096"))


def test_without_any_of_it_nothing_changes() -> None:
    """Without these sources, the archive's configuration is unchanged."""
    config = {"model": {"dtype": "float32"}, "pump": {"max_in_flight": 7}}

    assert apply_foreign_settings(config, {"PATH": "/bin", "HF_MODEL_ID": " "}, []) == config


@pytest.mark.parametrize("option", ["OPTION_TENSOR_PARALLEL_DEGREE", "SM_NUM_GPUS"])
@pytest.mark.parametrize("number", ["8", "max"])
def test_the_handlers_own_variable_wins_over_a_containers(option: str, number: str) -> None:
    """The control plane's variable wins over the container's, whose number belongs to another machine."""
    own = {"TORCHMOOR_HANDLER_MODEL_TENSOR_PARALLEL": "1"}

    assert settings({option: number, **own}).model.tensor_parallel == 1
