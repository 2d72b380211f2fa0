"""Create a directory of more than 200 models: MiniLM's variants, tiny models of every task, and broken ones."""

import json
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.make_minilm import OWN_WEIGHTS, SHARED_WEIGHTS, TARGET, WEIGHTS, link_checkpoint, make_variants
from tests.unit.handlers.many.tiny import save_checkpoint
from torchmoor.cli.model_archive import package

NUM_SCALED, NUM_HALF, NUM_FIRST = 200, 3, 3
CLASSIFIERS = tuple(f"classifier-{number}.tar.gz" for number in range(4))
TINY = {
    "entities.tar.gz": "BertForTokenClassification",
    "gaps.tar.gz": "RobertaForMaskedLM",
    "answers.tar.gz": "DistilBertForQuestionAnswering",
    "pictures.tar.gz": "ViTForImageClassification",
    "writes.tar.gz": "LlamaForCausalLM",
}
PLATFORM_NAME = "8d2f0a1c"  # the name of a model's folder on SageMaker's platform


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of MiniLM.

    number: see make_variants; is_half: weights are stored in half precision, so that inference needs its own memory;
    is_first: embeddings are the first token's instead of the mean.
    """

    name: str
    number: int
    is_half: bool = False
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Population:
    """broken: the expected error by name."""

    source: Path
    variants: Sequence[Variant]
    broken: Mapping[str, str]

    @property
    def platform_model(self) -> Path:
        """Copy the first classifier to where the platform would store it."""
        return self.source / "platform" / PLATFORM_NAME / "model"


def populate(source: Path, scratch: Path) -> Population:
    """Fill a new directory. scratch: on the same disk, so that large files are links to one copy."""
    scratch.mkdir()
    base = scratch / "minilm"
    link_checkpoint(TARGET, base)
    for number, name in enumerate(CLASSIFIERS):
        pack(save_checkpoint(scratch / name, "BertForSequenceClassification", seed=number), source / name)
    for name, architecture in TINY.items():
        pack(save_checkpoint(scratch / name, architecture), source / name)
    shutil.copytree(scratch / CLASSIFIERS[0], source / "platform" / PLATFORM_NAME / "model")
    _save_triton(scratch / "triton")
    pack(scratch / "triton", source / "triton.tar.gz")
    return Population(source, _add_variants(source, scratch, base), _add_broken(source, scratch, base))


def pack(folder: Path, archive: Path) -> None:
    """Pack a model.tar.gz as SageMaker's users do: the checkpoint's files at its top."""
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)


def _add_variants(source: Path, scratch: Path, base: Path) -> list[Variant]:
    scaled = make_variants(base, source, NUM_SCALED)
    variants = [Variant(folder.name, number) for number, folder in enumerate(scaled)]

    shutil.copytree(base, scratch / "half", ignore=shutil.ignore_patterns(WEIGHTS))
    save_file({name: tensor.half() for name, tensor in load_file(base / WEIGHTS).items()}, scratch / "half" / WEIGHTS)
    (scratch / "halves").mkdir()
    for number, folder in enumerate(make_variants(scratch / "half", scratch / "halves", NUM_HALF)):
        variants.append(Variant(f"half-{number}", number, is_half=True))
        folder.rename(source / variants[-1].name)

    (scratch / "firsts").mkdir()
    for number, folder in enumerate(make_variants(base, scratch / "firsts", NUM_FIRST)):
        pooling = folder / "1_Pooling" / "config.json"
        config = {**json.loads(pooling.read_text()), "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
        pooling.unlink()  # the file is a link
        pooling.write_text(json.dumps(config))
        variants.append(Variant(f"first-{number}", number, is_first=True))
        folder.rename(source / variants[-1].name)

    for number, name in ((20, "packed-20.tar.gz"), (40, "packed-40.tar.gz"), (60, "packed-60.mar")):
        package(scaled[number], source / name)
        variants.append(Variant(name, number))
    return variants


def _add_broken(source: Path, scratch: Path, base: Path) -> dict[str, str]:
    whole = (source / CLASSIFIERS[0]).read_bytes()
    (source / "corrupt.tar.gz").write_bytes(whole[:5000] + bytes(500) + whole[5500:])
    (source / "truncated.tar.gz").write_bytes(whole[: len(whole) // 2])
    (source / "text.tar.gz").write_bytes(b"this is no archive")
    cut, headless = make_variants(base, scratch, 2)
    for folder, name in ((cut, "cut"), (headless, "headless")):
        (folder / SHARED_WEIGHTS).unlink()  # a link, as above
        folder.rename(source / name)
    with (base / WEIGHTS).open("rb") as weights:
        (source / "cut" / SHARED_WEIGHTS).write_bytes(weights.read(1 << 20))
    pickled = save_checkpoint(scratch / "pickled", "BertModel")
    torch.save({}, pickled / "pytorch_model.bin")
    (pickled / WEIGHTS).unlink()
    pack(pickled, source / "pickled.tar.gz")
    return {
        "corrupt.tar.gz": "damaged",
        "truncated.tar.gz": "damaged",
        "text.tar.gz": "",
        "cut": SHARED_WEIGHTS,
        "headless": SHARED_WEIGHTS,
        "pickled.tar.gz": "handler.many.allow_pickle",
    }


def _save_triton(folder: Path) -> None:
    """Save a traced model that doubles its input, in Triton's layout."""

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    (folder / "1").mkdir(parents=True)
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        torch.jit.trace(Double(), torch.ones(1, 3)).save(str(folder / "1" / "model.pt"))
    (folder / "config.pbtxt").write_text(
        'name: "double"\nplatform: "pytorch_libtorch"\nmax_batch_size: 8\n'
        'input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3 ] } ]\n'
        'output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 3 ] } ]\n'
    )


def replace_variant(source: Path, old: str, new: str) -> None:
    """Replace the model `old` by `new`: an archive as a whole, a folder by the file in which they differ."""
    target = source / old if (source / old).is_file() else source / old / OWN_WEIGHTS
    beside = target.with_name(".new")
    shutil.copyfile(source / new if (source / new).is_file() else source / new / OWN_WEIGHTS, beside)
    beside.rename(target)
