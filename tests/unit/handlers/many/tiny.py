"""Create tiny random checkpoints of many architectures, as save_pretrained writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = [
    *("the", "a", "cat", "dog", "sat", "on", "mat", "in", "paris", "london", "anna", "works", "at", "acme", "is"),
    *("was", "red", "blue", "big", "small", "who", "where", "what"),
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [letter for c in "abcdefghijklmnopqrstuvwxyz.,?!" for letter in (c, f"##{c}")]
VOCABULARY = SPECIAL + WORDS + [word for word in LETTERS if word not in WORDS]

_TEXT = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_LLAMA = {**_TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
_GPT2 = {"vocab_size": len(VOCABULARY), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT2 |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
_IMAGE = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LABELS = {"num_labels": 3, "id2label": {0: "O", 1: "B-PER", 2: "I-PER"}, "label2id": {"O": 0, "B-PER": 1, "I-PER": 2}}
_DISTILBERT = {"vocab_size": len(VOCABULARY), "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
_DISTILBERT |= {"max_position_embeddings": 64}

# Functions that create an architecture's configuration.
CONFIGS: dict[str, Callable[[], Any]] = {
    "BertModel": lambda: hf.BertConfig(**_TEXT),
    "BertForMaskedLM": lambda: hf.BertConfig(**_TEXT),
    "BertForSequenceClassification": lambda: hf.BertConfig(**_TEXT, **_LABELS),
    "BertForTokenClassification": lambda: hf.BertConfig(**_TEXT, **_LABELS),
    "BertForQuestionAnswering": lambda: hf.BertConfig(**_TEXT),
    "DistilBertForSequenceClassification": lambda: hf.DistilBertConfig(**_DISTILBERT, **_LABELS),
    "DistilBertForQuestionAnswering": lambda: hf.DistilBertConfig(**_DISTILBERT),
    "RobertaForSequenceClassification": lambda: hf.RobertaConfig(**_TEXT, **_LABELS, pad_token_id=0),
    "RobertaForMaskedLM": lambda: hf.RobertaConfig(**_TEXT, pad_token_id=0),
    "MPNetModel": lambda: hf.MPNetConfig(**_TEXT, pad_token_id=0),
    "ViTForImageClassification": lambda: hf.ViTConfig(**_IMAGE, **_LABELS, intermediate_size=48),
    "SwinForImageClassification": lambda: hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4, **_LABELS
    ),
    "GPT2LMHeadModel": lambda: hf.GPT2Config(**_GPT2),
    "GPT2ForSequenceClassification": lambda: hf.GPT2Config(**_GPT2, **_LABELS),
    "LlamaForCausalLM": lambda: hf.LlamaConfig(**_LLAMA),
    "BertLMHeadModel": lambda: hf.BertConfig(**_TEXT),  # an encoder: its tokens see those that follow
    "Qwen2ForCausalLM": lambda: hf.Qwen2Config(**_LLAMA, tie_word_embeddings=True),
}


def save_checkpoint(folder: Path, architecture: str, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Path:
    """Save a random model of this architecture with its tokenizer or processor. options: save_pretrained's."""
    torch.manual_seed(seed)
    config = CONFIGS[architecture]()
    config.initializer_range = 0.5  # different answers for different inputs
    model = getattr(hf, architecture)(config).eval().to(getattr(torch, dtype))
    model.save_pretrained(folder, **options)
    if "Image" in architecture:
        hf.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    else:
        make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> Any:
    """Create a word piece tokenizer of a few words and all letters."""
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
    )
