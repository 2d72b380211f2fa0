"""Configurations that declare far more than their checkpoint holds, or are too large themselves."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from handlers.errors import ModelBroken, SettingsError
from handlers.many.loading.shared import SharedParts
from handlers.many.loading.transformers_loading import load_model as load_one_of_many
from handlers.many.model import LoadProgress
from handlers.models.declared_size import BuildLimit, check_buffers, check_config, check_files
from handlers.models.loader import load_model
from handlers.models.skeleton import build_skeleton
from handlers.settings.model import ModelSettings
from tests.waiting import PROGRAM_S

MB = 1_000_000
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48}
LLAMA |= {"num_attention_heads": 4, "vocab_size": 100}

# Configurations of a few bytes, and the reason for which each is refused.
TOO_LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({**LLAMA, "num_hidden_layers": 100_000_000}, "num_hidden_layers above 1000"),
    "layers of a few": ({**LLAMA, "num_hidden_layers": 999}, "more layers than its files hold \\(1 tensors"),
    "width": ({**LLAMA, "num_hidden_layers": 1, "hidden_size": 1 << 20}, "larger weights than its files hold"),
    "vocabulary": ({**LLAMA, "num_hidden_layers": 1, "vocab_size": 10**12}, "larger weights than its files hold"),
    "labels": ({**LLAMA, "num_hidden_layers": 1, "num_labels": 10**9}, "num_labels above 100000"),
    "decoder": (
        {"model_type": "llava", "text_config": {**LLAMA, "num_hidden_layers": 10**8}, "vision_config": {}},
        "num_hidden_layers above 1000",
    ),
    "experts": (
        {**LLAMA, "model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 10**8},
        "larger weights than its files hold",
    ),
    "tables": (
        {"model_type": "gpt_neo", "hidden_size": 4, "num_layers": 1, "attention_types": [[["global"], 1]]}
        | {"num_heads": 1, "vocab_size": 10, "max_position_embeddings": 100_000},
        "larger weights than its files hold|tables of",
    ),
}


def save_tiny(folder: Path, config: dict[str, Any]) -> Path:
    """Save a checkpoint of this configuration with one tensor of four numbers."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load_chat(folder: Path) -> None:
    load_model(folder, torch.device("cpu"), "auto")


def load_many(folder: Path) -> None:
    shared = SharedParts()
    load_one_of_many(folder, hf.AutoModelForCausalLM, None, shared, may_unpickle=False, progress=LoadProgress())


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_configuration_beyond_its_files_is_refused_by_a_chat_worker(name: str, tmp_path: Path) -> None:
    """A chat worker, and the vision models of a worker of many, refuse it before they make the model."""
    config, reason = TOO_LARGE[name]

    with pytest.raises(SettingsError, match=reason):
        load_chat(save_tiny(tmp_path / "model", config))


@pytest.mark.parametrize("name", [name for name in TOO_LARGE if name != "decoder"])
def test_a_configuration_beyond_its_files_is_refused_by_a_worker_of_many(name: str, tmp_path: Path) -> None:
    """A worker of many models refuses it with the same reason."""
    config, reason = TOO_LARGE[name]

    with pytest.raises(ModelBroken, match=reason):
        load_many(save_tiny(tmp_path / "model", config))


MEASURE = """
import sys
from pathlib import Path
from tests.unit.handlers.test_declared_size import TOO_LARGE, load_chat, load_many, save_tiny

def memory(field):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024

def refuse(config, load):
    try:
        load(save_tiny(Path(sys.argv[1]), config))
    except Exception:
        return
    raise AssertionError(config)

for load in (load_chat, load_many):  # imports what both need
    refuse(TOO_LARGE["width"][0], load)
before = memory("VmRSS")
for name, (config, reason) in TOO_LARGE.items():
    for load in (load_chat,) if name == "decoder" else (load_chat, load_many):
        refuse(config, load)
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
def test_refused_configurations_take_no_memory(tmp_path: Path) -> None:
    """Checkpoints of a few hundred bytes that declare gigabytes are refused without using that memory."""
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROGRAM_S)

    assert int(found.stdout) < 100 * MB


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 1000, "vocab_size_per_layer_input": 262_144, "layer_norm_eps": 1e-5},
        {"num_labels": 21_843, "max_position_embeddings": 10_485_760, "rope_theta": 10**9, "depths": [2, 2, 18, 2]},
        {"vision_feature_layer": -2, "layer_types": ["full_attention"] * 80, "vision_config": {"depth": 32}},
    ],
)
def test_configurations_of_large_models_pass(config: dict[str, Any]) -> None:
    """Configurations of the largest public models are accepted."""
    check_config(config)


@pytest.mark.parametrize(
    "config",
    [{"a": [{"depths": [1, 10**9]}]}, {"n_layer": 1e30}, {"first_k_dense_replace": 2**40}, [{"num_stages": 1001}]],
)
def test_counts_are_found_wherever_they_are(config: Any) -> None:
    """Nested configurations and lists are checked as well."""
    with pytest.raises(SettingsError, match=r"config\.json declares \w+ above 1000"):
        check_config(config)


def test_a_model_within_its_files_is_built() -> None:
    """A model is built within the limit of its own tensors, and even within half of it."""
    config = hf.BertConfig(hidden_size=32, num_attention_heads=4, intermediate_size=48)
    num_bytes = sum(p.nbytes for p in hf.BertModel(config).parameters())

    model = build_skeleton(config, hf.AutoModel, BuildLimit(199, num_bytes // 2))

    assert all(parameter.is_meta for parameter in model.parameters())


def test_tables_that_are_in_no_file_are_bounded() -> None:
    """The size of tables that are computed with the model and are in no file, such as masks, is limited."""

    class Masked(hf.PreTrainedModel):
        config_class = hf.BertConfig

    with torch.device("meta"):
        model = Masked(hf.BertConfig())
        model.register_buffer("mask", torch.ones(40_000, 40_000, dtype=torch.bool), persistent=False)

    with pytest.raises(SettingsError, match="declares tables of 1600000000 bytes, more than 1073741824"):
        check_buffers(model)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("config.json", "max_config_bytes"),
        ("tokenizer_config.json", "max_config_bytes"),
        ("chat_template.jinja", "max_config_bytes"),
        ("1_Pooling/config.json", "max_config_bytes"),
        ("tokenizer.json", "max_tokenizer_bytes"),
        ("model.safetensors.index.json", "max_tokenizer_bytes"),
    ],
)
def test_files_that_are_parsed_are_bounded(name: str, key: str, checkpoint: Path, tmp_path: Path) -> None:
    """A file of hundreds of MB is not read; files that no part reads may have any size."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    settings = ModelSettings(max_config_bytes=100_000, max_tokenizer_bytes=300_000)
    (folder / "trainer_state.json").write_bytes(bytes(400_000))
    (folder / "old_config.json").symlink_to("nothing")
    check_files(folder, settings)

    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(bytes(300_001))

    with pytest.raises(SettingsError, match=rf"{Path(name).name} has 300001 bytes, more than handler\.model\.{key}"):
        check_files(folder, settings)
