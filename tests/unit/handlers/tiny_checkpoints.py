"""Make tiny random checkpoints of many families, and generate the engine's answers from them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.kv_cache import BLOCK, SequenceCache, cache_shape
from handlers.engine.builtin.pace import Pace
from handlers.engine.builtin.runner import ModelRunner
from handlers.engine.builtin.scheduler import Scheduler
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import AnswerRequest, PlacedImage, SamplingParams, TokenEvent
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
        **GQA, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": lambda: hf.Qwen3Config(**GQA, head_dim=8),
    "mistral": lambda: hf.MistralConfig(**GQA, sliding_window=None),
    "mistral-window": lambda: hf.MistralConfig(**GQA, sliding_window=8),
    "phi3": lambda: hf.Phi3Config(**GQA),
    "phi3-long-rope": lambda: hf.Phi3Config(
        **GQA,
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [1.0, 4.0, 8.0, 16.0],
        },
    ),
    "dynamic-rope": lambda: hf.LlamaConfig(
        **GQA, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "gemma": lambda: hf.GemmaConfig(**GQA, head_dim=8),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **GQA, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "olmo2": lambda: hf.Olmo2Config(**GQA),
    "smollm3": lambda: hf.SmolLM3Config(**GQA),
    "qwen2-moe": lambda: hf.Qwen2MoeConfig(**GQA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4
    ),
}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
FALCON = {name: SIZES[name] for name in SIZES if name not in ("intermediate_size", "max_position_embeddings")}
# Families whose packed step would answer differently: they run as in transformers.
PLAIN: dict[str, Callable[[], Any]] = {
    "bloom": lambda: hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "codegen": lambda: hf.CodeGenConfig(**GPT, rotary_dim=4),
    "falcon-alibi": lambda: hf.FalconConfig(**FALCON, alibi=True, multi_query=False, new_decoder_architecture=False),
    "falcon-old": lambda: hf.FalconConfig(**FALCON, multi_query=True, new_decoder_architecture=False),
    "falcon-new": lambda: hf.FalconConfig(**FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "gemma2": lambda: hf.Gemma2Config(
        **GQA, head_dim=8, sliding_window=8, attn_logit_softcapping=0.05, final_logit_softcapping=1.0
    ),
    "gemma2-attention": lambda: hf.Gemma2Config(
        **GQA, head_dim=8, attn_logit_softcapping=50.0, final_logit_softcapping=None
    ),
    "gpt2": lambda: hf.GPT2Config(**GPT),
    "gptj": lambda: hf.GPTJConfig(**GPT, rotary_dim=4),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**SIZES),
    "granite": lambda: hf.GraniteConfig(**GQA, logits_scaling=8.0, embedding_multiplier=3.0),
    "llama4-chunks": lambda: hf.Llama4TextConfig(
        **GQA, head_dim=8, num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=32
    ),
    "mpt": lambda: hf.MptConfig(
        vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=256, eos_token_id=2
    ),
    "keys-larger-than-values": lambda: hf.DeepseekV2Config(
        **{**SIZES, "num_hidden_layers": 1},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=1,
    ),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "mamba": lambda: hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2),
    "falcon-mamba": lambda: hf.FalconMambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2
    ),
    "rwkv": lambda: hf.RwkvConfig(vocab_size=VOCABULARY, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2),
    "recurrent_gemma": lambda: hf.RecurrentGemmaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    ),
    "jamba": lambda: hf.JambaConfig(
        **GQA, num_experts=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False
    ),
}


def save(config: Any, where: Path, tokenizer_from: Path) -> Any:
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


def copy_with_two_layers(llava: Path, where: Path) -> None:
    """Copy a LLaVA checkpoint with the first and the last layer of each of its models."""
    for path in llava.iterdir():
        if path.is_file():
            shutil.copy(path, where)
    config = json.loads((llava / "config.json").read_text())
    tensors = load_file(llava / "model.safetensors")
    for part, prefix in (("text_config", "language_model"), ("vision_config", "vision_tower")):
        last = config[part]["num_hidden_layers"] - 1
        config[part]["num_hidden_layers"] = 2
        for name in [each for each in tensors if each.startswith(prefix)]:
            layer = re.search(r"\blayers\.(\d+)", name)
            if layer is not None and layer[1] != "0":
                tensor = tensors.pop(name)
                if int(layer[1]) == last:
                    tensors[name.replace(layer[0], "layers.1")] = tensor
    (where / "config.json").write_text(json.dumps(config))
    save_file(tensors, where / "model.safetensors", {"format": "pt"})


def generate(
    model: TextModel,
    prompts: list[list[int]],
    spans: list[list[PlacedImage]],
    num: int,
    is_row_batched: bool = False,
    is_scattered: bool = False,
    num_blocks: int = 64,
) -> tuple[list[list[int]], int]:
    """Return the engine's answers to prompts that join one after the other, in small chunks, without a thread.

    is_scattered: no two blocks of a sequence are adjacent.
    Returns the answers, and how many positions were shared instead of computed.
    """
    runner = ModelRunner(model, cache_shape(model).num_bytes(num_blocks * BLOCK), is_row_batched=is_row_batched)
    engine = Engine(runner, Scheduler(3, Pace(9, 1e9)), 1)
    outputs: list[list[int]] = [[] for _ in prompts]
    fillers = [SequenceCache(runner.pool) for _ in range(num_blocks if is_scattered else 0)]
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
        request = AnswerRequest(
            prompt=prompt, images=images, params=params, deadline=float("inf"), on_event=listener(output)
        )
        engine.admit(TokenSequence(cache, request))
        for _ in range(7):
            engine.step()
    while engine.scheduler.all():
        engine.step()
    runner.pool.check_integrity([*caches, *fillers])
    assert any(cache.run is None for cache in caches) == (is_scattered or num_shared > 0)
    return outputs, num_shared


def vision_config(checkpoint: Path) -> Any:
    """Return a configuration for the demo checkpoint's images, whose processor it uses."""
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
    """Return the configuration of a family that sees, around a language model."""
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
