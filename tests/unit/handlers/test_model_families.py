"""Tiny random checkpoints of several families: the engine answers as transformers does."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from handlers.engine.engine import Engine
from handlers.engine.kv_cache import BLOCK, SequenceCache
from handlers.engine.pace import Pace
from handlers.engine.runner import ModelRunner, cache_shape
from handlers.engine.scheduler import Scheduler
from handlers.engine.sequence import ImageSpan, SamplingParams, Sequence, TokenEvent
from handlers.errors import InvalidRequest, SettingsError
from handlers.models.loader import load_model
from handlers.models.text import TextModel

CPU = torch.device("cpu")
VOCABULARY = 508
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GQA = {**SIZES, "num_key_value_heads": 2}

WORKING: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "llama-gqa": lambda: hf.LlamaConfig(**GQA),
    "llama-mqa": lambda: hf.LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "llama-head-size": lambda: hf.LlamaConfig(**GQA, head_dim=16),
    "llama3-rope": lambda: hf.LlamaConfig(
        **GQA,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": lambda: hf.Qwen2Config(**GQA),
    "qwen2-mixed-windows": lambda: hf.Qwen2Config(
        **{**GQA, "num_hidden_layers": 4}, use_sliding_window=True, sliding_window=6, max_window_layers=2
    ),
    "qwen3": lambda: hf.Qwen3Config(**GQA, head_dim=8),
    "mistral": lambda: hf.MistralConfig(**GQA, sliding_window=None),
    "mistral-window": lambda: hf.MistralConfig(**GQA, sliding_window=8),
    "phi3": lambda: hf.Phi3Config(**GQA),
    "gemma": lambda: hf.GemmaConfig(**GQA, head_dim=8),
    "gemma3": lambda: hf.Gemma3TextConfig(**{**GQA, "num_hidden_layers": 7}, head_dim=8, sliding_window=8),
    "olmo2": lambda: hf.Olmo2Config(**GQA),
    "smollm3": lambda: hf.SmolLM3Config(**GQA),
    "qwen2-moe": lambda: hf.Qwen2MoeConfig(**GQA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4
    ),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: hf.Gemma2Config(**GQA, head_dim=8, attn_logit_softcapping=0.05, final_logit_softcapping=1.0),
    "gemma2-attention": lambda: hf.Gemma2Config(
        **GQA, head_dim=8, attn_logit_softcapping=50.0, final_logit_softcapping=None
    ),
    "granite": lambda: hf.GraniteConfig(**GQA, logits_scaling=8.0),
    "gpt2": lambda: hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "mamba": lambda: hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2),
    "dynamic-rope": lambda: hf.LlamaConfig(
        **GQA, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
}


def save(config: Any, where: Path, tokenizer_from: Path, **options: Any) -> Any:
    """Save a random checkpoint with the demo's tokenizer and chat template; return transformers' own model."""
    torch.manual_seed(3)
    loader = hf.AutoModelForImageTextToText if hasattr(config, "vision_config") else hf.AutoModelForCausalLM
    model = loader.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # distinct logits, so that equal answers are meaningful
    model.save_pretrained(where)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "processor_config.json"):
        shutil.copy(tokenizer_from / name, where)
    return model


def generate(
    model: TextModel,
    prompts: list[list[int]],
    spans: list[list[ImageSpan]],
    num: int,
    is_row_batched: bool = False,
    is_scattered: bool = False,
) -> tuple[list[list[int]], int]:
    """Return the engine's answers to prompts that join one after the other, in small chunks, without a thread.

    is_scattered: no two blocks of a sequence are adjacent.
    Returns the answers, and how many positions were shared instead of computed.
    """
    runner = ModelRunner(model, cache_shape(model).num_bytes(64 * BLOCK), is_row_batched)
    engine = Engine(runner, Scheduler(3, Pace(9, 1e9)), 1)
    outputs: list[list[int]] = [[] for _ in prompts]
    fillers = [SequenceCache(runner.pool) for _ in range(64 if is_scattered else 0)]
    for filler in fillers:
        filler.reserve(BLOCK)
    for filler in [f for f in fillers if f.table[0] % 2]:
        filler.drop()

    def listener(output: list[int]) -> Callable[[TokenEvent], bool]:
        def on_event(event: TokenEvent) -> bool:
            assert event.token_id is not None, event.error
            output.append(event.token_id)
            return True

        return on_event

    caches, num_shared = [], 0
    for prompt, images, output in zip(prompts, spans, outputs, strict=True):
        cache = SequenceCache(runner.pool)
        caches.append(cache)
        num_shared += cache.match(prompt)
        params = SamplingParams(max_new_tokens=num)
        engine.admit(Sequence(prompt, images, cache, params, float("inf"), listener(output)))
        for _ in range(7):
            engine.step()
    while engine.scheduler.all():
        engine.step()
    runner.pool.check_integrity([*caches, *fillers])
    assert any(cache.run is None for cache in caches) == (is_scattered or num_shared > 0)
    return outputs, num_shared


@pytest.mark.parametrize("family", WORKING)
def test_text_family_answers_as_in_transformers(
    family: str, tmp_path: Path, checkpoint: Path, one_thread: None
) -> None:
    """Ragged, chunked, batched greedy output equals generate() on each prompt alone, in float32.

    This holds for each attention implementation and block placement, also with shared beginnings.
    """
    own = save(WORKING[family](), tmp_path, checkpoint)
    model = load_model(tmp_path, CPU, "float32")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in (1, 5, 45, 17)]
    prompts += [[*prompts[2][:40], 9, 8], prompts[2]]
    no_images: list[list[ImageSpan]] = [[] for _ in prompts]
    expected = []
    for prompt in prompts:
        with torch.inference_mode():
            output = own.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, len(prompt) :]
        expected.append(output.tolist())

    for is_row_batched in (False, True):
        for is_scattered in (False, True):
            found, num_shared = generate(model, prompts, no_images, 20, is_row_batched, is_scattered)
            for output, whole in zip(found, expected, strict=True):
                assert output == whole[: len(output)]
                assert len(output) == 20 or output[-1] in model.eos_token_ids
            assert num_shared == 4 * BLOCK


@pytest.mark.parametrize("family", REFUSED)
def test_family_that_would_answer_otherwise_is_refused(
    family: str, tmp_path: Path, checkpoint: Path, one_thread: None
) -> None:
    """A model whose packed step differs from its own is a SettingsError at load, never a wrong answer."""
    save(REFUSED[family](), tmp_path, checkpoint)

    with pytest.raises(SettingsError):
        load_model(tmp_path, CPU, "float32")


def test_text_model_chats(tmp_path: Path, checkpoint: Path, make_client: Any) -> None:
    """Turns of a text model equal transformers'; images are refused with a reason."""
    own = save(WORKING["qwen2"](), tmp_path, checkpoint)
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


def llava_config(text: Any, checkpoint: Path) -> Any:
    """Return a configuration for the demo checkpoint's pictures, whose processor it uses."""
    demo = hf.AutoConfig.from_pretrained(checkpoint)
    vision = hf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=demo.vision_config.image_size,
        patch_size=demo.vision_config.patch_size,
    )
    return hf.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=demo.image_token_id,
        image_seq_length=demo.image_seq_length,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )


@pytest.mark.parametrize("family", ["qwen2", "mistral-window", "llama-gqa"])
def test_llava_on_other_language_models(
    family: str, tmp_path: Path, checkpoint: Path, drawing: Any, one_thread: None
) -> None:
    """Prompts with different images, batched with one without, equal transformers on each alone."""
    own = save(llava_config(WORKING[family](), checkpoint), tmp_path, checkpoint)
    model: Any = load_model(tmp_path, CPU, "float32")
    pictures = [drawing("ellipse", "red"), drawing("rectangle", "blue")]
    pixels = [model.preprocess(picture) for picture in pictures]
    features = [model.encode_image(p) for p in pixels]
    start, end = [1, 50, 51], [60, 61, 62, 63]
    prompts = [[*start, *([-9 - i] * len(features[i])), *end] for i in range(2)] + [[*start, *end]]
    spans = [[ImageSpan(3, features[0])], [ImageSpan(3, features[1])], []]

    found, num_shared = generate(model, prompts, spans, 8)

    assert found[0] != found[1]
    assert num_shared == 0
    for prompt, output, picture in zip(prompts, found, [*pixels, None], strict=True):
        inputs = {"input_ids": torch.tensor([[model.image_token_id if token < 0 else token for token in prompt]])}
        if picture is not None:
            inputs["pixel_values"] = picture
        with torch.inference_mode():
            expected = own.generate(**inputs, do_sample=False, max_new_tokens=8)
        assert output == expected[0, len(prompt) :].tolist()[: len(output)]


def test_other_models_that_see_are_refused(tmp_path: Path) -> None:
    """Another vision architecture is refused by its type, before its weights are read."""
    hf.Qwen2VLConfig().save_pretrained(tmp_path)

    with pytest.raises(SettingsError, match="qwen2_vl"):
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


def test_llava_without_a_template_speaks_llava(tmp_path: Path, checkpoint: Path) -> None:
    """The prompt has USER and ASSISTANT, the picture first, and one beginning of sequence."""
    save(llava_config(WORKING["llama"](), checkpoint), tmp_path, checkpoint)
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


def test_pickled_weights_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    """Pickled weights can run code, so they are refused."""
    own = save(WORKING["llama"](), tmp_path, checkpoint)
    (tmp_path / "model.safetensors").unlink()
    torch.save(own.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(SettingsError):
        load_model(tmp_path, CPU, "auto")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_loads(dtype: str, tmp_path: Path, checkpoint: Path, one_thread: None) -> None:
    """The check at load allows for the rounding of half precision."""
    save(WORKING["llama-gqa"](), tmp_path, checkpoint)

    assert load_model(tmp_path, CPU, dtype).dtype is getattr(torch, dtype)
