"""Merge an adapter into the weights of transformers' model, as the reference for tests of adapters."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def add_adapter(model: Any, folder: Path, sign: int = 1) -> Any:
    """Add an adapter to a model's weights in place, or subtract it; return the model."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    tensors = load_file(folder / "adapter_model.safetensors")
    layers = getattr(model.model, "language_model", model.model).layers
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            up = tensors[name.replace("lora_A", "lora_B")]
            layer = layers.get_submodule(name.partition("layers.")[2].removesuffix(".lora_A.weight"))
            layer.weight.data += sign * config["lora_alpha"] / config["r"] * (up @ down)
    return model


def generate_greedily(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
    return output[0, len(prompt) :].tolist()
