"""torch's RMSNorm in place of transformers' own."""

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from handlers.models.fast_layers import fuse_norms

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
IDS = torch.arange(1, 40)[None]


def randomize(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(0.5, 0.3, generator=generator)


@pytest.mark.parametrize(
    ("model", "num_norms"),
    [(LlamaForCausalLM(LlamaConfig(**SIZES)), 5), (Qwen3ForCausalLM(Qwen3Config(**SIZES)), 9)],
    ids=["llama", "qwen3"],
)
@torch.inference_mode()
def test_a_model_gives_the_same_logits(model: nn.Module, num_norms: int) -> None:
    """Replaced norms of layers, queries, keys and the last layer give the same logits."""
    randomize(model)
    expected = model(IDS).logits

    assert fuse_norms(model, torch.float32) == num_norms

    assert torch.allclose(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_does_not_keep_a_norm_from_being_replaced(dtype: torch.dtype) -> None:
    """A norm is replaced although transformers rounds it once more in 16 bits."""
    parent = nn.Sequential(LlamaRMSNorm(512)).to(dtype)
    randomize(parent)

    assert fuse_norms(parent, dtype) == 1
    assert isinstance(parent[0], nn.RMSNorm)


def test_norms_with_weights_of_another_type_or_a_gate_stay() -> None:
    """torch's norm has one type and no gate, so norms that need more stay unchanged."""
    parent = nn.Sequential(LlamaRMSNorm(512), Qwen3NextRMSNormGated(512))

    assert fuse_norms(parent, torch.bfloat16) == 0
    assert fuse_norms(parent, torch.float32) == 1


def test_other_formulas_stay() -> None:
    """Norms with another formula stay; Gemma, for example, adds 1 to the weights."""
    model = GemmaForCausalLM(GemmaConfig(**SIZES))
    randomize(model)

    assert fuse_norms(model, torch.float32) == 0
