"""Names a model by its kind and a sample of its weights, so that workers can tell whether theirs are the same."""

import hashlib
from typing import Any

import torch

NUM_SAMPLES = 8  # numbers of each parameter


@torch.inference_mode()
def fingerprint(model: Any) -> str:
    """Return a name that depends on weights, float types and layers. Call this before the weights are packed."""
    digest = hashlib.blake2b(model.config.model_type.encode(), digest_size=16)
    samples = []
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        samples.append(parameter.reshape(-1)[:NUM_SAMPLES].float())
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()
