"""Prompts and settings for the engine vllm, tested without vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from handlers.engine.contract import PlacedImage
from handlers.engine.vllm.images import VllmImage, make_prompt
from handlers.engine.vllm.start import ARGUMENTS, make_arguments, prepare_environment, read_prompts
from handlers.errors import SettingsError
from handlers.settings.handler import HandlerSettings, load_settings
from handlers.torchserve.start_many import check_engine
from tests.unit.handlers.many.tiny import save_checkpoint

IMAGE = 3


def picture(num_tokens: int) -> VllmImage:
    return VllmImage(Image.new("RGB", (8, 4)), num_tokens)


def settings(**environ: str) -> HandlerSettings:
    return load_settings({}, {f"TORCHMOOR_HANDLER_{name}": value for name, value in environ.items()})


def test_each_image_has_one_placeholder_and_its_key() -> None:
    """Neighbouring images, the same image twice, and images at either end each have one placeholder and a key."""
    first, second = picture(3), picture(2)
    keys = [-7, -7, -7, 11, -9, -9, -7, -7, -7]
    placed = [PlacedImage(0, first), PlacedImage(4, second), PlacedImage(6, first)]

    prompt = make_prompt(keys, placed, IMAGE, "scope")

    assert prompt["prompt_token_ids"] == [IMAGE, 11, IMAGE, IMAGE]
    assert prompt["multi_modal_uuids"] == {"image": ["-7", "-9", "-7"]}
    assert prompt["multi_modal_data"]["image"] == [first.image, second.image, first.image]
    assert prompt["cache_salt"] == "scope"


def test_a_prompt_without_images_has_none() -> None:
    assert make_prompt([5, 6], [], None, "scope") == {"prompt_token_ids": [5, 6], "cache_salt": "scope"}


def test_an_images_memory_is_that_of_its_pixels() -> None:
    assert (picture(5).nbytes, len(picture(5))) == (8 * 4 * 3, 5)


def test_settings_become_arguments_of_vllm(tmp_path: Any) -> None:
    found = make_arguments(
        settings(
            ENGINE_NAME="vllm",
            ENGINE_MAX_ROWS="12",
            ENGINE_MAX_CONTEXT_TOKENS="4096",
            MODEL_DTYPE="bfloat16",
            MODEL_TENSOR_PARALLEL="4",
            SESSION_KV_BYTES=str(1 << 30),
            SESSION_MAX_IMAGES="3",
            VLLM_PIPELINE_PARALLEL="2",
            VLLM_QUANTIZATION="awq",
            VLLM_KV_OFFLOAD_BYTES=str(4 << 30),
            VLLM_SPECULATIVE='{"method": "ngram", "num_speculative_tokens": 4}',
            VLLM_OPTIONS='{"block_size": 32}',
        ),
        tmp_path,
    )

    assert (
        found
        | {
            "model": str(tmp_path),
            "dtype": "bfloat16",
            "max_num_seqs": 12,
            "max_model_len": 4096,
            "tensor_parallel_size": 4,
            "pipeline_parallel_size": 2,
            "quantization": "awq",
            "kv_cache_memory_bytes": 1 << 30,
            "kv_offloading_size": 4.0,
            "limit_mm_per_prompt": {"image": 3},
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
            "block_size": 32,
        }
        == found
    )


def test_an_option_does_not_override_a_setting(tmp_path: Any) -> None:
    """The error names the setting of each argument that has one."""
    environ = {
        "ENGINE_NAME": "vllm",
        "ENGINE_MAX_CONTEXT_TOKENS": "4096",
        "SESSION_KV_BYTES": str(1 << 30),
        "VLLM_QUANTIZATION": "awq",
        "VLLM_KV_OFFLOAD_BYTES": str(4 << 30),
        "VLLM_SPECULATIVE": '{"method": "ngram"}',
        "ADAPTERS_SOURCE": "/adapters",
    }
    own = make_arguments(settings(**environ), tmp_path)
    with pytest.raises(SettingsError) as caught:
        make_arguments(settings(**environ, VLLM_OPTIONS=json.dumps(dict.fromkeys(own, 1))), tmp_path)

    problems = str(caught.value).removeprefix("handler.vllm.options: ").split("; ")
    assert "handler.engine.max_rows sets max_num_seqs" in problems
    assert "max_logprobs cannot be set, because the handler needs its own value" in problems
    assert len(problems) == len(own) == len(ARGUMENTS)
    for setting in filter(None, (setting for setting, _ in ARGUMENTS.values())):
        group, name = setting.split(".")
        assert hasattr(getattr(settings(), group), name)


@pytest.mark.parametrize(
    ("variable", "value", "key"),
    [
        ("SESSION_KV_TOKENS", "100", "session.kv_tokens"),
        ("JOURNAL_MAX_KV_BYTES", "100", "journal.max_kv_bytes"),
    ],
)
def test_what_vllm_does_not_have_is_refused(variable: str, value: str, key: str) -> None:
    with pytest.raises(SettingsError, match=f"handler.{key} is not offered by the engine vllm"):
        settings(ENGINE_NAME="vllm", **{variable: value})


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("VLLM_QUANTIZATION", "awq", "handler.vllm needs"),
        ("VLLM_OPTIONS", "block_size=32", "handler.vllm.options must be of type dict"),
        ("MODEL_TENSOR_PARALLEL", "2", "handler.model.tensor_parallel is 2.*set handler.engine.name to vllm"),
        ("ENGINE_NAME", "sglang", "must be builtin or vllm"),
    ],
)
def test_what_needs_vllm_says_so(variable: str, value: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        settings(**{variable: value})


def test_many_models_have_the_built_in_engine() -> None:
    with pytest.raises(SettingsError, match=r"handler\.engine\.name"):
        check_engine(settings(ENGINE_NAME="vllm"))


@pytest.mark.parametrize("name", ["VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH"])
def test_vllm_logs_as_the_operator_says(name: str) -> None:
    """Without a variable of vLLM's for logs, the handler's own configuration applies, which vLLM can read."""
    environ: dict[str, str] = {name: "x"}
    own: dict[str, str] = {}
    prepare_environment(settings(ENGINE_NAME="vllm"), None, environ)
    prepare_environment(settings(ENGINE_NAME="vllm"), None, own)

    assert {key: value for key, value in environ.items() if "LOGGING" in key} == {name: "x"}
    configuration = json.loads(Path(own["VLLM_LOGGING_CONFIG_PATH"]).read_text())
    assert configuration["loggers"]["vllm.logging_utils.dump_input"] == {"level": "CRITICAL"}


def test_a_model_of_one_gpu_sees_the_assigned_one() -> None:
    """A model of one GPU sees only the assigned one, since TorchServe counts visible GPUs.

    A distributed model sees all.
    """
    environ = {"CUDA_VISIBLE_DEVICES": "4,5"}
    prepare_environment(settings(ENGINE_NAME="vllm"), 1, environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "5"

    environ = {"CUDA_VISIBLE_DEVICES": "4,5"}
    prepare_environment(settings(ENGINE_NAME="vllm", MODEL_TENSOR_PARALLEL="2"), 0, environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "4,5"

    environ = {}
    prepare_environment(settings(ENGINE_NAME="vllm"), 2, environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "2"
    assert json.loads(environ["VLLM_NO_USAGE_STATS"]) == 1


def test_the_fingerprint_depends_on_what_changes_results(tmp_path: Path) -> None:
    """It depends on all options, whose effects the handler does not know, and on no memory, rows or folders."""

    def fingerprint(folder: str = "a", **environ: str) -> str:
        save_checkpoint(tmp_path / folder, "GPT2LMHeadModel")
        return read_prompts(
            tmp_path / folder, make_arguments(settings(ENGINE_NAME="vllm", **environ), tmp_path / folder)
        ).fingerprint

    options = '{"kv_cache_dtype": "fp8", "hf_overrides": {"a": 1, "b": 2}}'
    others = [
        {"VLLM_OPTIONS": '{"kv_cache_dtype": "fp8"}'},
        {"VLLM_OPTIONS": options},
        {"VLLM_SPECULATIVE": '{"method": "ngram"}'},
        {"VLLM_QUANTIZATION": "awq"},
        {"MODEL_DTYPE": "bfloat16"},
    ]

    found = {fingerprint(), *(fingerprint(**each) for each in others)}

    assert len(found) == 1 + len(others)
    assert fingerprint("b", ENGINE_MAX_ROWS="3", SESSION_KV_BYTES=str(1 << 30), VLLM_ENFORCE_EAGER="true") in found
    assert fingerprint(VLLM_OPTIONS='{"hf_overrides": {"b": 2, "a": 1}, "kv_cache_dtype": "fp8"}') in found


def test_a_checkpoint_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    """A checkpoint without a tokenizer is refused, because transformers would create an empty one."""
    save_checkpoint(tmp_path, "GPT2LMHeadModel")
    assert read_prompts(tmp_path, {"dtype": "auto"}).vocabulary
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 64}')

    with pytest.raises(ValueError, match="the tokenizer has no vocabulary"):
        read_prompts(tmp_path, {"dtype": "auto"})
