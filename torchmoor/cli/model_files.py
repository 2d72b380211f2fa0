"""The files of a Hugging Face directory that belong to its model, and the problems that keep it from being served."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from torchmoor.wire.archives import PACKED_SUFFIXES

WEIGHTS = (".safetensors",)
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
FOREIGN = (".h5", ".msgpack", ".onnx", ".tflite", ".gguf", ".ot", ".mlmodel")  # the same weights for other programs
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, which the safetensors library allows
JUNK = (".md", ".png", ".jpg", ".gif", ".lock", ".log", ".orig", ".tmp", ".part", ".ipynb", ".pyc")
JUNK_FOLDERS = ("__pycache__", "runs", "logs", "onnx", "openvino", "coreml")
TRAINING = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "trainer_state.json", "scaler.pt")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # of models that read images
INDEX = "model.safetensors.index.json"
OUTSIDE = " (a link that leads outside the directory)"  # follows the name of a file that is left out for this reason


def can_chat(folder: Path, files: Sequence[str]) -> bool:
    """Return whether the chat handler serves a checkpoint: a causal language model, or one that sees images.

    Its weights are safetensors, the only ones that the handler reads. A sentence encoder may have the same
    architecture, but has its modules.json.
    """
    config = _read_json(folder, "config.json", [])
    names = (config or {}).get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    is_model = name.endswith(("ForCausalLM", "LMHeadModel")) or (
        name.endswith("ForConditionalGeneration") and "vision_config" in (config or {})
    )
    has_weights = any(each.endswith(WEIGHTS) for each in files)
    return is_model and has_weights and not {"modules.json", "torchmoor.json"} & set(files)


def choose_files(folder: Path, *, allow_pickle: bool) -> tuple[list[str], list[str]]:
    """Return the sorted names of the files that belong to the model, and of those that do not.

    Links are followed within the directory, and to the files of a Hugging Face cache, whose snapshots consist of links.
    """
    files: list[str] = []
    left_out: list[str] = []
    root = folder.resolve()
    for base, folders, names in os.walk(folder, followlinks=True):
        depth = len(Path(base).relative_to(folder).parts)
        junk = [
            each for each in folders if each.startswith(".") or each in JUNK_FOLDERS or each.startswith("checkpoint-")
        ]
        outside = [each for each in folders if each not in junk and not _is_own(Path(base) / each, root)]
        left_out += [f"{(Path(base) / each).relative_to(folder)}/" for each in junk]
        left_out += [f"{(Path(base) / each).relative_to(folder)}/{OUTSIDE}" for each in outside]
        folders[:] = [each for each in folders if each not in (*junk, *outside)] if depth < 4 else []
        for name in names:
            path = Path(base) / name
            is_wanted = path.is_file() and not _is_junk(name) and (allow_pickle or not name.endswith(PICKLED))
            is_outside = is_wanted and not _is_own(path, root)
            shown = f"{path.relative_to(folder)}{OUTSIDE if is_outside else ''}"
            (files if is_wanted and not is_outside else left_out).append(shown)
    return sorted(files), sorted(left_out)


def _is_own(path: Path, root: Path) -> bool:
    """Return whether a file or folder is in a directory, or a file of a Hugging Face cache: models--x--y/blobs/HASH."""
    target = path.resolve()
    is_blob = target.parent.name == "blobs" and target.parents[1].name.startswith("models--")
    return target.is_relative_to(root) or (is_blob and target.is_file())


def _is_junk(name: str) -> bool:
    return name.startswith(".") or name in TRAINING or name.lower().endswith((*JUNK, *FOREIGN, *PACKED_SUFFIXES))


def find_problems(folder: Path, files: Sequence[str], left_out: Sequence[str], *, allow_pickle: bool) -> list[str]:
    """Return the reasons why the model could not be served, each with a remedy."""
    problems: list[str] = []
    config = _read_json(folder, "config.json", problems)
    if config is not None and not config.get("architectures"):
        problems.append("config.json names no architectures, which determine the task: save it with save_pretrained")
    weights = [name for name in files if name.endswith(WEIGHTS)]
    pickled = [name for name in (files if allow_pickle else left_out) if name.endswith(PICKLED)]
    if not weights and not (pickled and allow_pickle):
        advice = "save it with save_pretrained, which writes model.safetensors"
        if pickled:
            advice += f"; or take {', '.join(pickled[:3])} with --allow-pickle, if you trust who made it"
        problems.append(f"there are no .safetensors weights: {advice}")
    outside = [name.removesuffix(OUTSIDE) for name in left_out if name.endswith(OUTSIDE)]
    needed = [
        name for name in outside if name.endswith(WEIGHTS) or name in ("config.json", INDEX, *TOKENIZERS, *PROCESSORS)
    ]
    if needed:
        problems.append(f"links lead outside the directory: copy the files there ({', '.join(needed[:5])})")
    missing = _read_shards(folder, problems) - set(files) if INDEX in files else ()
    if missing:
        problems.append(f"{INDEX} names files that are not there: {', '.join(sorted(missing)[:5])}")
    unreadable = [name for name in files if not os.access(folder / name, os.R_OK)]
    if unreadable:
        problems.append(f"this user may not read {', '.join(unreadable[:5])}")
    for name in weights:
        if name not in unreadable and not _is_whole(folder / name):
            problems.append(f"{name} is cut off or not a safetensors file (a Git LFS pointer?): download it again")
    if not any(name in files for name in (*TOKENIZERS, *PROCESSORS)):
        problems.append("there is neither a tokenizer (tokenizer.json) nor an image processor: save it there, too")
    return problems


def _read_shards(folder: Path, problems: list[str]) -> set[str]:
    """Return the names of the files in which the index places weights."""
    shards = (_read_json(folder, INDEX, problems) or {}).get("weight_map")
    return {str(shard) for shard in shards.values()} if isinstance(shards, dict) else set()


def _read_json(folder: Path, name: str, problems: list[str]) -> dict[str, object] | None:
    try:
        content = json.loads((folder / name).read_bytes())
    except FileNotFoundError:
        problems.append(f"there is no {name}: give the directory that save_pretrained wrote")
        return None
    except (OSError, ValueError) as exc:
        problems.append(f"{name} cannot be read: {exc}")
        return None
    return content if isinstance(content, dict) else {}


def _is_whole(path: Path) -> bool:
    """Return whether a safetensors file has the length that its header says: 8 bytes of length, JSON, tensors."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or length > min(num_bytes - 8, MAX_HEADER_BYTES):
            return False
        try:
            header = json.loads(file.read(length))
            ends = [int(entry["data_offsets"][1]) for key, entry in header.items() if key != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
            return False
    return 8 + length + max(ends, default=0) == num_bytes
