"""Make tiny checkpoints of vision families with random weights, in transformers' format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForImageTextToText

TOKENIZER = Path(__file__).parents[2] / "models" / "tiny-llava"
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SIGLIP = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 14,
}
# vLLM's memory profiling reads a picture of the largest size that a processor allows, so this size is small.
QWEN_SIZE = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 64}


def build_qwen2_5_vl(folder: Path) -> None:
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer, ids = _extend_tokenizer(marks, picture="<|vision_start|><|image_pad|><|vision_end|>")
    config = hf.Qwen2_5_VLConfig(
        text_config={**TEXT, **_qwen_text(ids)},
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 2,
            "out_hidden_size": TEXT["hidden_size"],
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        **_qwen_marks(ids),
    )
    images = hf.Qwen2VLImageProcessor(size=QWEN_SIZE)
    _save(folder, config, hf.Qwen2_5_VLProcessor(images, tokenizer, hf.Qwen2VLVideoProcessor(size=QWEN_SIZE)))


def build_qwen2_vl(folder: Path) -> None:
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer, ids = _extend_tokenizer(marks, picture="<|vision_start|><|image_pad|><|vision_end|>")
    config = hf.Qwen2VLConfig(
        text_config={**TEXT, **_qwen_text(ids)},
        vision_config={"depth": 3, "embed_dim": 64, "num_heads": 2, "hidden_size": TEXT["hidden_size"]},
        **_qwen_marks(ids),
    )
    images = hf.Qwen2VLImageProcessor(size=QWEN_SIZE)
    _save(folder, config, hf.Qwen2VLProcessor(images, tokenizer, hf.Qwen2VLVideoProcessor(size=QWEN_SIZE)))


def build_gemma3(folder: Path) -> None:
    newlines = ["\n" * number for number in range(1, 5)]  # its vocabulary has each as one token
    marks = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer, ids = _extend_tokenizer(marks, picture="<start_of_image>", words=newlines)
    config = hf.Gemma3Config(
        text_config={
            **TEXT,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "vocab_size": _padded(ids),
            "sliding_window": 64,
        },
        vision_config={**SIGLIP, "image_size": 112, "vision_use_head": False},
        mm_tokens_per_image=16,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
    )
    images = hf.Gemma3ImageProcessor(size={"height": 112, "width": 112})
    _save(folder, config, hf.Gemma3Processor(images, tokenizer, image_seq_length=16))


def build_llava_onevision(folder: Path) -> None:
    tokenizer, ids = _extend_tokenizer(["<video>"], picture="<image>")
    pinpoints = [[112, 112], [112, 224], [224, 112], [224, 224]]
    config = hf.LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": _padded(ids)},
        vision_config={**SIGLIP, "model_type": "siglip_vision_model", "image_size": 112, "vision_use_head": False},
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=pinpoints,
    )
    size = {"height": 112, "width": 112}
    images = hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints)
    videos = hf.LlavaOnevisionVideoProcessor(size=size)
    processor = hf.LlavaOnevisionProcessor(
        images, tokenizer, videos, num_image_tokens=64, vision_feature_select_strategy="full"
    )
    _save(folder, config, processor, seed=2)


def build_internvl(folder: Path) -> None:
    marks = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer, ids = _extend_tokenizer(marks, picture="<IMG_CONTEXT>\n")
    config = hf.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": _padded(ids)},
        vision_config={
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": [112, 112],
            "patch_size": [14, 14],
        },
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=16,
        tie_word_embeddings=False,
    )
    size = {"height": 112, "width": 112}
    images = hf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=4)
    processor = hf.InternVLProcessor(images, tokenizer, hf.InternVLVideoProcessor(size=size), image_seq_length=16)
    _save(folder, config, processor)


FAMILIES: dict[str, Callable[[Path], None]] = {
    "qwen2_5_vl": build_qwen2_5_vl,
    "qwen2_vl": build_qwen2_vl,
    "gemma3": build_gemma3,
    "llava_onevision": build_llava_onevision,
    "internvl": build_internvl,
}

ANSWERING = sorted(FAMILIES.keys() - {"gemma3"})  # whose answers are compared


def _qwen_text(ids: dict[str, int]) -> dict[str, Any]:
    sections = [4, 6, 6]  # of the 16 rotated pairs, for time, height and width
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    return {"vocab_size": _padded(ids), "rope_parameters": rope}


def _qwen_marks(ids: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _padded(ids: dict[str, int]) -> int:
    return -(-max(ids.values()) // 64) * 64 + 64


def _extend_tokenizer(marks: Any, picture: str, words: list[str] | None = None) -> tuple[Any, dict[str, int]]:
    """Return the demo checkpoint's tokenizer with more tokens, and their ids.

    marks: control tokens, a list or a dict by the names of attributes; picture: what the template writes for one.
    """
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER / "tokenizer.json"),
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<pad>",
        padding_side="left",
        extra_special_tokens=marks,
    )
    if words:
        tokenizer.add_tokens(words)
    template = (TOKENIZER / "chat_template.jinja").read_text()
    tokenizer.chat_template = template.replace("'<image>'", json.dumps(picture))
    return tokenizer, tokenizer.get_vocab()


def _save(folder: Path, config: Any, processor: Any, seed: int = 0) -> None:
    """Write a checkpoint with random weights, so large that answers depend on the images.

    seed: of one for which answers do not repeat a token.
    """
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 1.5 / weight[0].numel() ** 0.5)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.1)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
