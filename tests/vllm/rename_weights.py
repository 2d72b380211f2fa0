"""Give a LLaVA checkpoint's weights the names that vLLM loads: those of the checkpoints that llava-hf has published.

transformers 5.23 writes others (`vision_tower.embeddings` for `vision_tower.vision_model.embeddings`).
"""

import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

_RENAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^vision_tower\.(?!vision_model\.)"), "vision_tower.vision_model."),
    (re.compile(r"^language_model\.(?!model\.|lm_head)"), "language_model.model."),
    (re.compile(r"^lm_head"), "language_model.lm_head"),
)


def copy_renamed(checkpoint: Path, where: Path) -> Path:
    """Copy a checkpoint of one safetensors file, and rename its weights; return the copy."""
    shutil.copytree(checkpoint, where, ignore=shutil.ignore_patterns("samples"))
    weights = {}
    for name, tensor in load_file(where / "model.safetensors").items():
        for pattern, replacement in _RENAMES:
            name = pattern.sub(replacement, name)
        weights[name] = tensor.contiguous()
    save_file(weights, where / "model.safetensors", metadata={"format": "pt"})
    return where
