"""Builds a LLaVA with random weights on the device: its answers are noise, but its cost is realistic."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from benchmarks.report import ROOT
from handlers.engine.builtin.kv_cache import BLOCK
from handlers.models.llava import LlavaModel
from handlers.models.processor import Processor
from handlers.models.transformers_check import TransformersCheck

TINY = ROOT / "models" / "tiny-llava"  # for its tokenizer and chat template


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model. hidden, layers, heads, kv_heads, feed_forward: language model; vision_*: vision tower."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    vision_hidden: int
    vision_layers: int
    image_size: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llava-1.5-7b", 4096, 32, 32, 32, 11008, 32064, 1024, 24, 336),
        Shape("llama-3-8b", 4096, 32, 32, 8, 14336, 128256, 1024, 24, 336),
        Shape("tiny", 64, 2, 4, 2, 128, 512, 32, 2, 56),
    )
}


@torch.inference_mode()
def build_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> LlavaModel:
    """Return the model, checked against transformers as a worker does when it loads one."""
    tokenizer = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    model = make_weights(shape, tokenizer, device, dtype)
    transformers_check = TransformersCheck(model)
    loaded = LlavaModel(model, Processor.load(TINY, model.config.image_token_id))
    loaded.eos_token_ids = frozenset()  # so that each answer reaches its limit
    loaded.optimize()
    transformers_check.check(loaded)
    return loaded


@torch.inference_mode()
def make_weights(
    shape: Shape, tokenizer: PreTrainedTokenizerBase, device: torch.device, dtype: torch.dtype
) -> LlavaForConditionalGeneration:
    """Return transformers' model with random weights and without an end token."""
    vision = CLIPVisionConfig(
        hidden_size=shape.vision_hidden,
        intermediate_size=4 * shape.vision_hidden,
        num_hidden_layers=shape.vision_layers,
        num_attention_heads=shape.vision_hidden // 16 if shape.name == "tiny" else shape.vision_hidden // 64,
        image_size=shape.image_size,
        patch_size=14,
    )
    text = LlamaConfig(
        vocab_size=max(shape.vocabulary, len(tokenizer)),
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=image_token_id)
    config.vision_feature_layer = -2
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights(), device:
            model: LlavaForConditionalGeneration = LlavaForConditionalGeneration(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    model.generation_config.eos_token_id = None
    return model


def save_checkpoint(shape: Shape, device: torch.device, dtype: torch.dtype, folder: Path) -> None:
    """Write the same random weights to `folder`, with a tokenizer that has a word for each token of the vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    tokenizer.add_tokens([f" w{number}" for number in range(len(tokenizer), shape.vocabulary)])
    make_weights(shape, tokenizer, device, dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = json.loads((TINY / "processor_config.json").read_bytes())
    size = {"height": shape.image_size, "width": shape.image_size}
    processor["image_processor"] |= {"size": size, "crop_size": size}
    processor["patch_size"] = 14
    (folder / "processor_config.json").write_text(json.dumps(processor))
    shutil.copy(TINY / "chat_template.jinja", folder)


def weight_bytes(model: LlavaModel) -> int:
    """Return the bytes that a decoding step reads of the language model's weights."""
    head = model.model.get_output_embeddings()
    weights = [*model.decoder.layers.parameters(), *model.decoder.norm.parameters(), *head.parameters()]
    return sum(weight.nbytes for weight in weights)


def kv_token_bytes(model: LlavaModel) -> int:
    """Return the bytes of one position's keys and values."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_size * model.dtype.itemsize


def kv_bytes(model: LlavaModel, num_tokens: int) -> int:
    """Return the bytes of a KV cache with this many positions and its spare block."""
    return kv_token_bytes(model) * (-(-num_tokens // BLOCK) + 1) * BLOCK
