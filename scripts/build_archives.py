"""Build the .mar archives of model_store/: handler code, weights and settings in one file each.

python scripts/build_archives.py                 all archives
python scripts/build_archives.py --only llava    one of them
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Archive:
    """What goes into one .mar: an entry file, a model-config, a checkpoint directory."""

    name: str
    entry: str
    checkpoint: str  # below the models directory


ARCHIVES = (Archive("llava", "chat_entry.py", "tiny-llava"),)


def build(archive: Archive, models: Path, store: Path) -> Path:
    """Write `store/name.mar`; an archive that exists is replaced only when the new one is complete.

    The archiver flattens a directory that it is given, so everything that must keep its folder is staged inside
    one parent directory, and the parent is given.
    """
    checkpoint = models / archive.checkpoint
    if not (checkpoint / "config.json").is_file():
        raise SystemExit(f"build_archives: there is no checkpoint in {checkpoint}")
    with tempfile.TemporaryDirectory(prefix="torchmoor-archive-") as temporary:
        stage = Path(temporary) / "stage"
        code = ("__pycache__", "*.pyc", "configs", archive.entry)
        shutil.copytree(ROOT / "handlers", stage / "handlers", ignore=shutil.ignore_patterns(*code))
        shutil.copytree(checkpoint, stage / "model", ignore=shutil.ignore_patterns("samples", "*.md", "__pycache__"))
        command = [
            *(str(Path(sys.executable).with_name("torch-model-archiver")), "--force"),
            *("--model-name", archive.name, "--version", "1.0"),
            *("--handler", str(ROOT / "handlers" / archive.entry)),
            *("--config-file", str(ROOT / "handlers" / "configs" / f"{archive.name}.yaml")),
            *("--extra-files", str(stage), "--export-path", temporary),
        ]
        own = {**os.environ, "TMPDIR": temporary}  # the archiver works in a folder there that it names after the model
        subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL, env=own)
        store.mkdir(parents=True, exist_ok=True)
        partial = store / f".{archive.name}.mar.partial"
        shutil.copyfile(Path(temporary) / f"{archive.name}.mar", partial)
        return partial.rename(store / f"{archive.name}.mar")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[a.name for a in ARCHIVES], help="build only this archive")
    parser.add_argument("--models-dir", type=Path, default=ROOT / "models", help="where the checkpoints are")
    parser.add_argument("--model-store", type=Path, default=ROOT / "model_store", help="where the archives go")
    options = parser.parse_args()
    for archive in ARCHIVES:
        if options.only is None or archive.name in options.only:
            path = build(archive, options.models_dir, options.model_store)
            print(
                f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
                f"  {path.stat().st_size / 1e6:.1f} MB",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
