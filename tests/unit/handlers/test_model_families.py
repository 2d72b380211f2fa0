"""Tiny random checkpoints of several families: the engine answers as transformers does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from handlers.engine.builtin.kv_cache import BLOCK
from handlers.engine.contract import PlacedImage
from handlers.errors import InvalidRequest, SettingsError
from handlers.models import transformers_check
from handlers.models.attention import DecodingRows
from handlers.models.loader import load_model
from scripts.make_smollm2 import TARGET as SMOLLM2
from tests.tools import missing
from tests.unit.handlers.tiny_checkpoints import CPU, PLAIN, REFUSED, VOCABULARY, WORKING, generate, save, seeing_config

# One family for each part that others combine; test-slow has all.
USUAL = {
    *("llama", "llama-mqa", "llama3-rope", "qwen2-mixed-windows", "qwen3", "phi3", "gemma3", "olmo2", "opt"),
    *("gpt2", "falcon-new", "gemma2", "keys-larger-than-values"),
}
NUM_TOKENS = 13  # of an answer: all prompts but the shortest grow into another block


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in (*WORKING, *PLAIN)],
)
def test_text_family_answers_as_in_transformers(
    family: str, tmp_path: Path, checkpoint: Path, one_thread: None
) -> None:
    """Ragged, chunked, batched greedy output equals generate() on each prompt alone, in float32.

    This holds for each attention implementation and block placement, also with shared beginnings.
    """
    own = save({**WORKING, **PLAIN}[family](), tmp_path, checkpoint)
    model = load_model(tmp_path, CPU, "float32")
    assert model.is_packed == (family in WORKING)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in (1, 5, 45, 17)]
    prompts += [[*prompts[2][:40], 9, 8], prompts[2]]
    no_images: list[list[PlacedImage]] = [[] for _ in prompts]
    expected = []
    for prompt in prompts:
        with torch.inference_mode():
            output = own.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS)[0, len(prompt) :]
        expected.append(output.tolist())

    for is_row_batched in (False, True) if model.is_packed else (False,):
        for is_scattered in (False, True):
            found, num_shared = generate(model, prompts, no_images, NUM_TOKENS, is_row_batched, is_scattered)
            for output, whole in zip(found, expected, strict=True):
                assert output == whole[: len(output)]
                assert len(output) == NUM_TOKENS or output[-1] in model.eos_token_ids
            assert num_shared == 4 * BLOCK


@pytest.mark.parametrize("family", REFUSED)
def test_family_that_would_answer_otherwise_is_refused(
    family: str, tmp_path: Path, checkpoint: Path, one_thread: None
) -> None:
    """A model that needs more than keys and values is a SettingsError at load, never a wrong answer."""
    save(REFUSED[family](), tmp_path, checkpoint)

    with pytest.raises(SettingsError, match=r"models .* are not supported") as caught:
        load_model(tmp_path, CPU, "float32")
    assert "AttributeError" not in str(caught.value)


@pytest.mark.parametrize(("family", "limit"), [("phi3-long-rope", 128), ("dynamic-rope", 256), ("mpt", 256)])
def test_context_ends_where_rope_frequencies_change(family: str, limit: int, tmp_path: Path, checkpoint: Path) -> None:
    """The context ends where keys computed with other RoPE frequencies would no longer fit the stored ones."""
    save({**WORKING, **PLAIN}[family](), tmp_path, checkpoint)

    assert load_model(tmp_path, CPU, "float32").max_context == limit


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_text_model_chats(family: str, tmp_path: Path, checkpoint: Path, make_client: Any) -> None:
    """Turns of a text model equal transformers'; images are refused with a reason."""
    own = save({**WORKING, **PLAIN}[family](), tmp_path, checkpoint)
    model = load_model(tmp_path, CPU, "float32")
    client = make_client(model)
    messages: list[dict[str, str]] = []

    refused = client.call({"type": "start_session", "image": "aGk="})
    sid = client.open()
    for text in ("hello", "and now?"):
        messages.append({"role": "user", "content": text})
        found = client.answer(sid, text, parameters={"max_new_tokens": 6})
        rendered = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = model.tokenizer(rendered, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            output = own.generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :]
        assert found == model.tokenizer.decode(output, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": found})

    assert (refused.status, refused.error) == (400, "InvalidRequest")
    assert "text only" in refused.json["error"]["message"]


@pytest.mark.parametrize("config", [hf.Qwen2VLConfig, hf.Qwen2_5_VLConfig, hf.Gemma3Config, hf.InternVLConfig])
def test_other_models_that_see_are_refused(tmp_path: Path, config: type[hf.PreTrainedConfig]) -> None:
    """Another vision architecture is refused by its type, before its weights are read; the error names vLLM."""
    config().save_pretrained(tmp_path)

    with pytest.raises(SettingsError, match=f"type {config.model_type} are not supported.*engine.name: vllm"):
        load_model(tmp_path, CPU, "auto")


def test_llama_without_a_template_speaks_llama_2(tmp_path: Path, checkpoint: Path) -> None:
    """A llama checkpoint without a template gets Llama 2's, with one beginning of sequence."""
    save(WORKING["llama"](), tmp_path, checkpoint)
    (tmp_path / "chat_template.jinja").unlink()

    model = load_model(tmp_path, CPU, "float32")
    ids = model.render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], [])

    assert model.tokenizer.decode(ids) == "<s>[INST] Hi [/INST]"
    assert ids == model.encode_prompt(["<s>[INST] Hi [/INST]"], [])


def test_other_model_without_a_template_reads_raw_prompts_only(tmp_path: Path, checkpoint: Path) -> None:
    """The model loads; a conversation is refused with advice."""
    save(WORKING["qwen2"](), tmp_path, checkpoint)
    (tmp_path / "chat_template.jinja").unlink()

    model = load_model(tmp_path, CPU, "float32")

    with pytest.raises(InvalidRequest, match="inputs"):
        model.render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], [])
    assert model.encode_prompt(["Hi"], [])


def test_a_prompt_without_tokens_is_refused(tmp_path: Path, checkpoint: Path, make_client: Any) -> None:
    """A template may make nothing of an empty message; beside another answer, the answer began with its tokens."""
    save(WORKING["qwen2"](), tmp_path, checkpoint)
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    client = make_client(load_model(tmp_path, CPU, "float32"))

    refused = client.call({"messages": [{"role": "user", "content": ""}], "max_tokens": 1})

    assert (refused.status, refused.error) == (400, "InvalidRequest")
    assert "no tokens" in refused.json["error"]["message"]
    assert client.call({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).status == 200


def test_llava_without_a_template_speaks_llava(tmp_path: Path, checkpoint: Path) -> None:
    """The prompt has USER and ASSISTANT, the image first, and one beginning of sequence."""
    save(seeing_config("llava", WORKING["llama"](), checkpoint), tmp_path, checkpoint)
    (tmp_path / "chat_template.jinja").unlink()

    model: Any = load_model(tmp_path, CPU, "float32")
    ids = model.render([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}], [3])

    image = [model.image_token_id] * 3
    tokenizer = model.tokenizer
    before = tokenizer("USER: ", add_special_tokens=False)["input_ids"]
    after = tokenizer("\nHi ASSISTANT:", add_special_tokens=False)["input_ids"]
    beginning = tokenizer("")["input_ids"]
    assert ids == [*beginning, *before, *image, *after]


def test_directory_without_a_checkpoint_is_a_config_error(tmp_path: Path) -> None:
    """The error contains the wrong path."""
    with pytest.raises(SettingsError, match=str(tmp_path)):
        load_model(tmp_path, CPU, "auto")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "broken"])
def test_damaged_checkpoint_is_a_config_error(name: str, damage: str, tmp_path: Path, checkpoint: Path) -> None:
    """TorchServe expects a RuntimeError, whatever transformers raises."""
    save(WORKING["llama"](), tmp_path, checkpoint)
    if damage == "missing":
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(b"{broken")

    with pytest.raises(SettingsError):
        load_model(tmp_path, CPU, "auto")


@pytest.mark.parametrize("method", ["awq", "nvfp4"])
def test_quantized_weights_are_refused(tmp_path: Path, checkpoint: Path, method: str) -> None:
    """The error names vLLM, whether transformers needs another package or does not read the weights at all."""
    save(WORKING["llama"](), tmp_path, checkpoint)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))

    with pytest.raises(SettingsError, match=r"its weights are quantized: vLLM serves more"):
        load_model(tmp_path, CPU, "auto")


def test_an_empty_quantization_is_none(tmp_path: Path, checkpoint: Path) -> None:
    """Some checkpoints declare it as null; an error of their weights has another reason."""
    save(WORKING["llama"](), tmp_path, checkpoint)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    load_model(tmp_path, CPU, "auto")
    (tmp_path / "tokenizer.json").write_bytes(b"{")

    with pytest.raises(SettingsError) as caught:
        load_model(tmp_path, CPU, "auto")

    assert "quantized" not in str(caught.value)


def test_quantized_weights_that_transformers_ignores_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    """transformers only warns of a method that it does not know, and reads the weights without their scales."""
    save(WORKING["llama"](), tmp_path, checkpoint)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "modelopt"}}))

    with pytest.raises(SettingsError, match=r"quantized by modelopt are not supported; vLLM serves more"):
        load_model(tmp_path, CPU, "auto")


def test_pickled_weights_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    """Pickled weights can run code, so they are refused."""
    own = save(WORKING["llama"](), tmp_path, checkpoint)
    (tmp_path / "model.safetensors").unlink()
    torch.save(own.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(SettingsError, match=r"pickled weights \(\.bin\) are not read: save it again"):
        load_model(tmp_path, CPU, "auto")


@pytest.mark.parametrize("head", [hf.AutoModelForSequenceClassification, hf.AutoModelForMaskedLM])
def test_models_with_other_tasks_are_refused(head: Any, tmp_path: Path) -> None:
    """The error names the endpoint that serves such a model, and does not blame the weights."""
    config = hf.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    head.from_config(config).save_pretrained(tmp_path)

    with pytest.raises(SettingsError, match=r"does not generate text: .*--endpoint many"):
        load_model(tmp_path, CPU, "auto")


def test_weights_that_give_no_numbers_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    """The error says that the weights are damaged or too large for the type, and does not blame the family."""
    own = save(WORKING["llama"](), tmp_path, checkpoint)
    with torch.no_grad():
        own.get_output_embeddings().weight *= float("inf")
    own.save_pretrained(tmp_path)

    with pytest.raises(SettingsError, match="logits are not finite: its weights are damaged, or the range of float32"):
        load_model(tmp_path, CPU, "auto")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_loads(dtype: str, tmp_path: Path, checkpoint: Path, one_thread: None) -> None:
    """The check at load allows for the rounding of half precision."""
    save(WORKING["llama-gqa"](), tmp_path, checkpoint)

    assert load_model(tmp_path, CPU, dtype).dtype is getattr(torch, dtype)


@pytest.mark.slow
def test_a_real_model_loads_in_half_precision(one_thread: None) -> None:
    """A model of 30 layers loads, although transformers differs by a tenth if it reads a prompt in several steps."""
    if not (SMOLLM2 / "config.json").is_file():
        missing(f"there is no {SMOLLM2}: make archives downloads it")

    assert load_model(SMOLLM2, CPU, "bfloat16").is_packed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_of_decoding_rows_alone_is_noticed(
    dtype: str, checkpoint: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at load also tests decoding alone, which a GPU uses; here each row misses one position."""

    def miss_first(table: torch.Tensor, lengths: torch.Tensor, block: int) -> DecodingRows:
        return DecodingRows(table[:, 1:], lengths - 1, block)

    monkeypatch.setattr(transformers_check, "DecodingRows", miss_first)

    with pytest.raises(SettingsError, match="in steps of one token per row"):
        load_model(checkpoint, CPU, dtype)
