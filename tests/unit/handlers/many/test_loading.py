"""Loading checkpoints by template and mapped weights, compared with transformers' own way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.initialization import no_tie_weights

from handlers.errors import ModelBroken
from handlers.many.loading.shared import SharedParts
from handlers.many.loading.tensor_placement import Assembled
from handlers.many.loading.transformers_loading import load_model
from handlers.many.model import LoadProgress
from tests.unit.handlers.many.tiny import CONFIGS, save_checkpoint

HEADS = {
    "Model": hf.AutoModel,
    "MaskedLM": hf.AutoModelForMaskedLM,
    "SequenceClassification": hf.AutoModelForSequenceClassification,
    "TokenClassification": hf.AutoModelForTokenClassification,
    "QuestionAnswering": hf.AutoModelForQuestionAnswering,
    "ImageClassification": hf.AutoModelForImageClassification,
    "LMHeadModel": hf.AutoModelForCausalLM,
    "CausalLM": hf.AutoModelForCausalLM,
}


def head_of(architecture: str) -> Any:
    return max(((name, auto) for name, auto in HEADS.items() if architecture.endswith(name)), key=lambda h: len(h[0]))[
        1
    ]


@pytest.fixture(scope="module")
def shared() -> SharedParts:
    return SharedParts()


def load(
    folder: Path, auto: Any, shared: SharedParts, dtype: torch.dtype | None = None, may_unpickle: bool = False
) -> Assembled:
    return load_model(folder, auto, dtype, shared, may_unpickle=may_unpickle, progress=LoadProgress())


@torch.inference_mode()
def answer(model: Any) -> torch.Tensor:
    if model.main_input_name == "pixel_values":
        found = model(pixel_values=torch.linspace(-1, 1, 2 * 3 * 32 * 32, dtype=model.dtype).reshape(2, 3, 32, 32))
    else:
        found = model(input_ids=torch.tensor([[2, 5, 6, 7, 8, 3], [2, 9, 10, 3, 11, 3]]))
    return torch.cat([part.flatten() for part in found.to_tuple() if isinstance(part, torch.Tensor)])


def assert_same(found: Any, expected: Any) -> None:
    """Compare all parameters and buffers, including those not in a file, and the models' outputs."""
    theirs = dict(expected.named_buffers(remove_duplicate=False)) | dict(expected.named_parameters())
    ours = dict(found.named_buffers(remove_duplicate=False)) | dict(found.named_parameters())
    without_pooler = {name: t for name, t in theirs.items() if "pooler" not in name}
    theirs = theirs if ours.keys() == theirs.keys() else without_pooler
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype is ours[name].dtype, name
        assert torch.equal(tensor, ours[name]), name
    assert not found.training
    if "pooler" not in dict(expected.named_children()):
        assert torch.equal(answer(found), answer(expected))


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "BertForMaskedLM"])
def test_weights_are_tied_while_another_thread_makes_a_model(
    architecture: str, tmp_path: Path, shared: SharedParts
) -> None:
    """from_pretrained replaces the function that ties weights, for the whole process, until its model is made."""
    auto = head_of(architecture)
    load(save_checkpoint(tmp_path, architecture), auto, shared)

    with no_tie_weights():
        found = load(tmp_path, auto, shared)

    assert_same(found.model, auto.from_pretrained(tmp_path, dtype="auto").eval())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_model_equals_the_one_that_transformers_loads(
    architecture: str, dtype: str, tmp_path: Path, shared: SharedParts
) -> None:
    """Weights, tied weights and buffers without a file are equal, in the stored type."""
    save_checkpoint(tmp_path, architecture, dtype=dtype)
    auto = head_of(architecture)
    expected = auto.from_pretrained(tmp_path, dtype="auto")

    found = load(tmp_path, auto, shared)

    assert_same(found.model, expected)
    assert found.mapped


def test_a_stored_type_may_be_widened(tmp_path: Path, shared: SharedParts) -> None:
    """A CPU computes stored half precision in float32; the new tensors are the model's own memory."""
    save_checkpoint(tmp_path, "BertForMaskedLM", dtype="float16")

    found = load(tmp_path, hf.AutoModelForMaskedLM, shared, torch.float32)

    assert_same(found.model, hf.AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert not {p.data_ptr() for p in found.model.parameters()} & found.mapped


def test_weights_in_several_files_are_one_model(tmp_path: Path, shared: SharedParts) -> None:
    """An index may name several files, but none outside the model's folder."""
    save_checkpoint(tmp_path, "LlamaForCausalLM", max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    assert_same(
        load(tmp_path, hf.AutoModelForCausalLM, shared).model, hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    )

    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))
    with pytest.raises(ModelBroken, match="not in the model's folder"):
        load(tmp_path, hf.AutoModelForCausalLM, shared)


def test_names_of_other_times_and_heads_are_understood(tmp_path: Path, shared: SharedParts) -> None:
    """Gamma and beta of layer norms, a missing or additional base prefix, and another task's head are accepted."""
    save_checkpoint(tmp_path, "BertForMaskedLM")
    file = tmp_path / "model.safetensors"
    tensors = {k.replace("LayerNorm.weight", "LayerNorm.gamma"): v for k, v in load_file(file).items()}
    tensors = {k.replace("LayerNorm.bias", "LayerNorm.beta"): v.clone() for k, v in tensors.items()}
    save_file({**tensors, "cls.seq_relationship.weight": torch.ones(2, 32)}, file, metadata={"format": "pt"})

    assert_same(
        load(tmp_path, hf.AutoModelForMaskedLM, shared).model, hf.AutoModelForMaskedLM.from_pretrained(tmp_path)
    )
    assert_same(load(tmp_path, hf.AutoModel, shared).model, hf.AutoModel.from_pretrained(tmp_path))


def test_models_of_one_configuration_share_nothing_but_it(tmp_path: Path, shared: SharedParts) -> None:
    """Models copy a template, so that the weights of one variant never appear in another."""
    folders = [save_checkpoint(tmp_path / str(seed), "BertForSequenceClassification", seed=seed) for seed in (1, 2)]
    auto = hf.AutoModelForSequenceClassification

    found = [load(folder, auto, shared).model for folder in folders]

    for model, folder in zip(found, folders, strict=True):
        assert_same(model, auto.from_pretrained(folder))
    assert not torch.equal(answer(found[0]), answer(found[1]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("classifier.weight"), "incomplete: classifier.weight missing"),
        (lambda t: t.update({"bert.encoder.layer.2.output.dense.bias": torch.ones(32)}), "no place for bert.encoder"),
        (lambda t: t.update({"classifier.bias": torch.ones(7)}), "do not fit"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Any, reason: str, tmp_path: Path, shared: SharedParts) -> None:
    """Unknown or missing weights are an error, so that a model never answers with untrained or partial layers."""
    save_checkpoint(tmp_path, "BertForSequenceClassification")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelBroken, match=reason):
        load(tmp_path, hf.AutoModelForSequenceClassification, shared)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 7, b"\xff" * 8, (9).to_bytes(8, "little") + b'{"a": 1}', b"PK", "cut off"]
)
def test_a_damaged_file_is_refused(content: bytes | str, tmp_path: Path, shared: SharedParts) -> None:
    """A download may be incomplete."""
    save_checkpoint(tmp_path, "BertModel")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if content == "cut off" else content)

    with pytest.raises(ModelBroken, match="safetensors"):
        load(tmp_path, hf.AutoModel, shared)


def test_pickled_weights_need_a_setting_and_hold_only_tensors(tmp_path: Path, shared: SharedParts) -> None:
    """The error names the setting; with it, a pickle that would run code is still refused."""
    save_checkpoint(tmp_path, "BertModel")
    expected = hf.AutoModel.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(expected.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelBroken, match=r"handler\.many\.allow_pickle"):
        load(tmp_path, hf.AutoModel, shared)
    found = load(tmp_path, hf.AutoModel, shared, may_unpickle=True)
    assert_same(found.model, expected)
    assert not found.mapped

    torch.save({"a": Path}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelBroken, match="more than tensors"):
        load(tmp_path, hf.AutoModel, shared, may_unpickle=True)


@pytest.mark.parametrize(
    "config",
    ["{}", "[]", "nonsense", '{"model_type": "nobody"}', '{"model_type": "bert", "hidden_size": 33}'],  # prose: allow
)
def test_a_wrong_configuration_is_refused(config: str, tmp_path: Path, shared: SharedParts) -> None:
    """A wrong configuration is refused with the file's name."""
    save_checkpoint(tmp_path, "BertModel")
    (tmp_path / "config.json").write_text(config)

    with pytest.raises(ModelBroken, match=r"config\.json"):
        load(tmp_path, hf.AutoModel, shared)


def test_code_that_came_with_a_checkpoint_is_not_run(tmp_path: Path, shared: SharedParts) -> None:
    """The loader never enables trust_remote_code."""
    save_checkpoint(tmp_path, "BertModel")
    config = json.loads((tmp_path / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": own}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")

    with pytest.raises(ModelBroken):
        load(tmp_path, hf.AutoModel, shared)
    assert not (tmp_path / "ran").exists()
