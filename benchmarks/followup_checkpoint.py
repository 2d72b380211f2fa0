"""Builds a LLaVA of real shape with random weights: its answers are noise, but its cost is realistic."""

from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2Config,
)

from benchmarks.report import ROOT

TOKENIZER = ROOT / "models" / "tiny-llava"
IMAGE_SIZE = 336
NUM_IMAGE_TOKENS = 576
FEATURE_BYTES = NUM_IMAGE_TOKENS * 896 * 4  # tokens x hidden size x float32


def build_checkpoint(folder: Path, *, quick: bool) -> int:
    """Write the checkpoint to `folder`; return its number of parameters.

    The shape is CLIP-L/14-336 (576 image tokens) with Qwen2-0.5B; quick: with a fifth of the layers.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=5 if quick else 24,
        num_attention_heads=16,
        image_size=IMAGE_SIZE,
        patch_size=14,
        projection_dim=768,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=_text_config(tokenizer, num_layers=num_layers(quick=quick)),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=NUM_IMAGE_TOKENS,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    _favor_words(model, tokenizer)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=(TOKENIZER / "chat_template.jinja").read_text(),
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def _favor_words(model: LlavaForConditionalGeneration, tokenizer: AutoTokenizer) -> None:
    """Make answers printable and varied. Otherwise noise would repeat a token, or consist of unprintable bytes."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    is_word = torch.tensor([text.isprintable() and text.isascii() and len(text) > 0 for text in texts])
    is_word[tokenizer.all_special_ids] = False
    embedding = model.get_input_embeddings().weight.data  # tied to the output head, so tokens with zeros never win
    embedding.mul_(15 * is_word[:, None])


def num_layers(*, quick: bool) -> int:
    """Return the number of layers of the language model."""
    return 5 if quick else 24


def kv_token_bytes(*, quick: bool) -> int:
    """Return the bytes of a token's keys and values: 2 x layers x KV heads x head size x 4."""
    return 2 * num_layers(quick=quick) * 2 * 64 * 4


def _text_config(tokenizer: AutoTokenizer, num_layers: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=num_layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
