"""Make random LoRA adapters of a checkpoint, for experiments. Each adapter leads to different answers.

python scripts/make_adapters.py --number 200 --to DIR     DIR/adapter-000 ... DIR/adapter-199 for models/smollm2
python scripts/make_adapters.py --checkpoint models/tiny-llava --number 3 --to DIR

An adapter is a folder in PEFT's format, and its number determines its contents. Existing folders are kept.
"""

import argparse
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "models" / "smollm2"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_WEIGHT = re.compile(rf"(?P<layer>(?!.*vision).*layers\.\d+\..*\.(?P<projection>{'|'.join(PROJECTIONS)}))\.weight")
STRENGTH = 0.15


class Layer(NamedTuple):
    """A linear layer of the checkpoint's decoder. std: standard deviation of its weights."""

    name: str
    num_outputs: int
    num_inputs: int
    std: float


def read_layers(checkpoint: Path, projections: Sequence[str] = PROJECTIONS) -> list[Layer]:
    """Return the layers that adapters change."""
    found = []
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        for name in sorted(file.keys()):
            match = _WEIGHT.fullmatch(name)
            if match is not None and match["projection"] in projections:
                weight = file.get_tensor(name).float()
                found.append(Layer(match["layer"], *weight.shape, float(weight.std())))
    return found


def make_adapters(
    checkpoint: Path,
    folder: Path,
    number: int,
    *,
    rank: int = 8,
    strength: float = STRENGTH,
    projections: Sequence[str] = PROJECTIONS,
) -> list[Path]:
    """Write adapters and return their folders. strength: size of an adapter's output relative to the layer's."""
    layers = read_layers(checkpoint, projections)
    made = []
    for seed in range(number):
        target = folder / f"adapter-{seed:03}"
        if not target.exists():
            write_adapter(layers, target, seed, rank, strength)
        made.append(target)
    return made


def write_adapter(layers: Sequence[Layer], target: Path, seed: int, rank: int = 8, strength: float = STRENGTH) -> None:
    """Write one adapter of these layers; the folder appears when it is complete."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in layers:
        down = torch.randn(rank, layer.num_inputs, generator=generator) / layer.num_inputs**0.5
        up = torch.randn(layer.num_outputs, rank, generator=generator)
        up *= strength * layer.std * (layer.num_inputs / rank) ** 0.5
        prefix = f"base_model.model.{layer.name}"
        tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({layer.name.rpartition(".")[2] for layer in layers}),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
    }
    unfinished = target.parent / f".{target.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(tensors, unfinished / "adapter_model.safetensors")
    (unfinished / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    unfinished.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="default: models/smollm2")
    parser.add_argument("--number", type=int, required=True, help="number of adapters")
    parser.add_argument("--rank", type=int, default=8, help="default: 8")
    parser.add_argument("--to", type=Path, required=True, help="folder of the adapters")
    options = parser.parse_args()
    made = make_adapters(options.checkpoint, options.to, options.number, rank=options.rank)
    print(f"{len(made)} adapters are in {options.to}")


if __name__ == "__main__":
    main()
