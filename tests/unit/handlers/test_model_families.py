"""Tiny random checkpoints of several families: what the engine answers, transformers answers."""

import json
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
from handlers.errors import ConfigError, InvalidRequest
from handlers.models.attention import RAGGED
from handlers.models.loader import load_model
from handlers.models.pixels import Pixels
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
    """A random checkpoint with the demo's tokenizer and chat template; returns transformers' own model."""
    torch.manual_seed(3)
    loader = hf.AutoModelForImageTextToText if hasattr(config, "vision_config") else hf.AutoModelForCausalLM
    model = loader.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # well apart logits, so that equal means equal
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
    """What the engine answers, one prompt joining after the other, cut into small chunks and few rows. No thread.

    is_scattered: no two blocks of a sequence lie side by side.
    Returns the answers, and how many positions were not computed because another sequence had them.
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
        engine._admit(Sequence(prompt, images, cache, params, float("inf"), listener(output)))
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

    However attention is computed, wherever the blocks lie, and also where a beginning is another sequence's.
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
    """A model whose packed step is not the model's own is a ConfigError at load, never a wrong answer."""
    save(REFUSED[family](), tmp_path, checkpoint)

    with pytest.raises(ConfigError):
        load_model(tmp_path, CPU, "float32")


def test_text_model_chats(tmp_path: Path, checkpoint: Path, make_client: Any) -> None:
    """A session over a model that does not see: turns as transformers answers them, images refused with a reason."""
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


def vision_config(checkpoint: Path) -> Any:
    """The same pictures as the demo checkpoint's, whose processor it uses."""
    demo = hf.AutoConfig.from_pretrained(checkpoint)
    return hf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=demo.vision_config.image_size,
        patch_size=demo.vision_config.patch_size,
    )


def seeing_config(family: str, text: Any, checkpoint: Path) -> Any:
    """A model that sees, of the family, around a language model."""
    demo = hf.AutoConfig.from_pretrained(checkpoint)
    side = demo.vision_config.image_size
    common = {"vision_config": vision_config(checkpoint), "text_config": text, "image_token_index": demo.image_token_id}
    shapes = [[side, side], [side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
    select = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    if family == "llava":
        return hf.LlavaConfig(**common, **select, image_seq_length=demo.image_seq_length)
    if family == "vipllava":
        return hf.VipLlavaConfig(**common, vision_feature_layers=[-2, -1, 1], image_seq_length=demo.image_seq_length)
    if family == "llava_next":
        return hf.LlavaNextConfig(**common, **select, image_grid_pinpoints=shapes)
    assert family == "llava_onevision"
    return hf.LlavaOnevisionConfig(
        **common, **select, image_grid_pinpoints=shapes, vision_aspect_ratio="anyres_max_4", video_token_index=9
    )


def use_any_resolution(where: Path, family: str) -> None:
    """The demo's image processor in its family's form, which cuts pictures into patches."""
    config = json.loads((where / "processor_config.json").read_text())
    (where / "processor_config.json").unlink()
    own = config["image_processor"]
    side = own["size"]["height"]
    own["image_grid_pinpoints"] = [[side, side], [side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
    own["image_processor_type"] = {
        "llava_next": "LlavaNextImageProcessor",
        "llava_onevision": "LlavaOnevisionImageProcessor",
    }[family]
    (where / "preprocessor_config.json").write_text(json.dumps(own))


def compare_with_generate(model: Any, own: Any, pictures: list[Any]) -> None:
    """Two prompts with a picture each, one with both, one with none, batched, equal transformers on each alone."""
    pixels = [model.preprocess(picture) for picture in pictures]
    features = [model.encode_image(p) for p in pixels]
    start, middle, end = [1, 50, 51], [70, 71], [60, 61, 62, 63]
    spots = [[-9 - i] * len(features[i]) for i in range(2)]
    prompts = [
        [*start, *spots[0], *end],
        [*start, *spots[1], *end],
        [*start, *spots[0], *middle, *spots[1], *end],
        [*start, *end],
    ]
    second = 3 + len(features[0]) + len(middle)
    spans = [
        [ImageSpan(3, features[0])],
        [ImageSpan(3, features[1])],
        [ImageSpan(3, features[0]), ImageSpan(second, features[1])],
        [],
    ]

    found, _ = generate(model, prompts, spans, 8)

    assert found[0] != found[1]
    for prompt, output, shown in zip(prompts, found, [pixels[:1], pixels[1:], pixels, []], strict=True):
        inputs = {"input_ids": torch.tensor([[model.image_token_id if token < 0 else token for token in prompt]])}
        if shown:
            inputs |= as_transformers_takes(shown)
        with torch.inference_mode():
            expected = own.generate(**inputs, do_sample=False, max_new_tokens=8)
        assert output == expected[0, len(prompt) :].tolist()[: len(output)]


def as_transformers_takes(shown: list[Any]) -> dict[str, Any]:
    """Several pictures of one prompt; those cut into fewer patches are filled up."""
    if not isinstance(shown[0], Pixels):
        return {"pixel_values": torch.cat(shown)}
    longest = max(p.values.shape[1] for p in shown)
    filled = [torch.nn.functional.pad(p.values, (0, 0) * 3 + (0, longest - p.values.shape[1])) for p in shown]
    return {"pixel_values": torch.cat(filled), "image_sizes": torch.tensor([p.size for p in shown])}


@pytest.mark.parametrize("family", ["qwen2", "mistral-window", "llama-gqa"])
def test_llava_on_other_language_models(
    family: str, tmp_path: Path, checkpoint: Path, drawing: Any, one_thread: None
) -> None:
    """Pictures of several prompts and several of one prompt are seen as in transformers."""
    own = save(seeing_config("llava", WORKING[family](), checkpoint), tmp_path, checkpoint)

    model = load_model(tmp_path, CPU, "float32")

    compare_with_generate(model, own, [drawing("ellipse", "red"), drawing("rectangle", "blue")])


@pytest.mark.parametrize("family", ["vipllava", "llava_next", "llava_onevision"])
def test_other_families_that_see(family: str, tmp_path: Path, checkpoint: Path, drawing: Any, one_thread: None) -> None:
    """The same; where a picture's shape decides how it is cut, a wide one and a tall one."""
    own = save(seeing_config(family, long_qwen2(), checkpoint), tmp_path, checkpoint)
    if family != "vipllava":
        use_any_resolution(tmp_path, family)

    model = load_model(tmp_path, CPU, "float32")

    pictures = [drawing("ellipse", "red").resize((150, 60)), drawing("rectangle", "blue").resize((90, 130))]
    compare_with_generate(model, own, pictures)


def long_qwen2() -> Any:
    """Room for pictures of many tokens."""
    return hf.Qwen2Config(**{**GQA, "max_position_embeddings": 1024})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_of_the_vision_tower_is_a_setting(
    attention: str, tmp_path: Path, checkpoint: Path, drawing: Any, one_thread: None
) -> None:
    """Either implementation gives the same features, and the decoder keeps the packed one."""
    save(seeing_config("llava", WORKING["qwen2"](), checkpoint), tmp_path, checkpoint)
    usual: Any = load_model(tmp_path, CPU, "float32")

    model: Any = load_model(tmp_path, CPU, "float32", attention)

    picture = model.preprocess(drawing("ellipse", "red"))
    assert model.model.model.vision_tower.config._attn_implementation == attention
    assert model.decoder.config._attn_implementation == RAGGED
    assert torch.allclose(usual.encode_image(picture), model.encode_image(picture), atol=1e-4)


def test_attention_that_is_not_installed_is_a_config_error(tmp_path: Path, checkpoint: Path) -> None:
    """flash_attention_2 is a package and a GPU of its own."""
    save(seeing_config("llava", WORKING["qwen2"](), checkpoint), tmp_path, checkpoint)

    with pytest.raises(ConfigError, match=r"(?i)flash"):
        load_model(tmp_path, CPU, "float32", "flash_attention_2")


@pytest.mark.parametrize("form", ["chat_template.json", "tokenizer_config.json"])
def test_older_forms_of_the_chat_template_are_read(form: str, tmp_path: Path, checkpoint: Path) -> None:
    """Checkpoints of several years have it in several places."""
    save(seeing_config("llava", WORKING["qwen2"](), checkpoint), tmp_path, checkpoint)
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    old = json.loads((tmp_path / form).read_text()) if (tmp_path / form).is_file() else {}
    (tmp_path / form).write_text(json.dumps({**old, "chat_template": template}))

    model = load_model(tmp_path, CPU, "float32")

    assert model.template.chat_template == template


def test_other_models_that_see_are_refused(tmp_path: Path) -> None:
    """A vision model of another construction is refused by its type, before its weights are read."""
    hf.Qwen2VLConfig().save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="qwen2_vl"):
        load_model(tmp_path, CPU, "auto")


def test_llama_without_a_template_speaks_llama_2(tmp_path: Path, checkpoint: Path) -> None:
    """A checkpoint from before the days of templates is asked as it was trained, with one beginning of sequence."""
    save(WORKING["llama"](), tmp_path, checkpoint)
    (tmp_path / "chat_template.jinja").unlink()

    model = load_model(tmp_path, CPU, "float32")
    ids = model.render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], [])

    assert model.tokenizer.decode(ids) == "<s>[INST] Hi [/INST]"
    assert ids == model.encode_prompt(["<s>[INST] Hi [/INST]"], [])


def test_other_model_without_a_template_reads_raw_prompts_only(tmp_path: Path, checkpoint: Path) -> None:
    """It loads; a conversation is refused with what to do instead."""
    save(WORKING["qwen2"](), tmp_path, checkpoint)
    (tmp_path / "chat_template.jinja").unlink()

    model = load_model(tmp_path, CPU, "float32")

    with pytest.raises(InvalidRequest, match="inputs"):
        model.render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], [])
    assert model.encode_prompt(["Hi"], [])


def test_llava_without_a_template_speaks_llava(tmp_path: Path, checkpoint: Path) -> None:
    """USER and ASSISTANT, the picture first, and the sequence begins once."""
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
    """The path that is wrong is named."""
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_model(tmp_path, CPU, "auto")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "broken"])
def test_damaged_checkpoint_is_a_config_error(name: str, damage: str, tmp_path: Path, checkpoint: Path) -> None:
    """TorchServe expects a RuntimeError there, whatever transformers raises."""
    save(WORKING["llama"](), tmp_path, checkpoint)
    if damage == "missing":
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(b"{broken")

    with pytest.raises(ConfigError):
        load_model(tmp_path, CPU, "auto")


def test_pickled_weights_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    """Weights in pickle form can run code: they are not read."""
    own = save(WORKING["llama"](), tmp_path, checkpoint)
    (tmp_path / "model.safetensors").unlink()
    torch.save(own.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(ConfigError):
        load_model(tmp_path, CPU, "auto")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_loads(dtype: str, tmp_path: Path, checkpoint: Path, one_thread: None) -> None:
    """The load-time comparison allows for the rounding of the half types."""
    save(WORKING["llama-gqa"](), tmp_path, checkpoint)

    assert load_model(tmp_path, CPU, dtype).dtype is getattr(torch, dtype)
