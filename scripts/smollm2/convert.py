"""Converts a GGUF file of the Llama family to a Hugging Face checkpoint: safetensors, tokenizer, chat template.

transformers can read GGUF too, but it needs another package, takes a minute instead of seconds, cannot save the model
that it has read, and does not split digits as SmolLM2's tokenizer does.
"""

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

SPECIAL = 3  # GGUF's type of a control token
# The tensors of a layer: GGUF's names, and those of transformers.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(source: Path, target: Path) -> None:
    """Write the checkpoint into the new folder `target`, with weights in float16.

    The file has weights of 4 and 8 bits with float16 scales. float16 represents them to 1/2000, bfloat16 to 1/250.
    """
    reader = GGUFReader(source)
    config = make_config(reader)
    target.mkdir(parents=True)
    config.save_pretrained(target)
    make_generation_config(reader).save_pretrained(target)
    make_tokenizer(reader).save_pretrained(target)
    save_file(read_weights(reader, config), target / "model.safetensors", metadata={"format": "pt"})


def field(reader: GGUFReader, name: str) -> Any:
    """Return a value of the file's header. Raises KeyError if there is none."""
    return reader.fields[name].contents()


def make_config(reader: GGUFReader) -> LlamaConfig:
    names = {tensor.name for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=field(reader, "llama.vocab_size"),
        hidden_size=field(reader, "llama.embedding_length"),
        intermediate_size=field(reader, "llama.feed_forward_length"),
        num_hidden_layers=field(reader, "llama.block_count"),
        num_attention_heads=field(reader, "llama.attention.head_count"),
        num_key_value_heads=field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=field(reader, "llama.context_length"),
        rms_norm_eps=field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field(reader, "llama.rope.freq_base")},
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=field(reader, "tokenizer.ggml.padding_token_id"),
        dtype="float16",
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


def make_generation_config(reader: GGUFReader) -> GenerationConfig:
    return GenerationConfig(
        bos_token_id=field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=field(reader, "tokenizer.ggml.padding_token_id"),
    )


def make_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Return the file's byte-level BPE. Each digit is a separate token, as in SmolLM2's training."""
    if (kind := field(reader, "tokenizer.ggml.pre")) != "smollm":
        raise ValueError(f"the tokenizer must be of kind smollm, not {kind}")
    tokens: list[str] = field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def named(name: str) -> str:
        return tokens[field(reader, f"tokenizer.ggml.{name}_token_id")]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        chat_template=field(reader, "tokenizer.chat_template"),
        model_max_length=field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )


def read_weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Return the weights in float16, by the names of transformers."""
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        name = translate(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = unpermute(values, heads)
        weights[name] = values.to(torch.float16).contiguous()
    return weights


def translate(name: str) -> str:
    """Return the name of a tensor in transformers. Raises KeyError if Llama has no such tensor."""
    if name.startswith("blk."):
        _, layer, part, kind = name.split(".")
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
    part, kind = name.split(".")
    return f"{OTHER_NAMES[part]}.{kind}"


def unpermute(weights: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of each head: GGUF's rotary embedding pairs neighbouring rows, transformers pairs its halves."""
    rows, columns = weights.shape
    return weights.reshape(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
