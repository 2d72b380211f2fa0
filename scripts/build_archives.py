"""Build the .mar archives of model_store/, each with handler code, weights and settings.

python scripts/build_archives.py                 build all archives whose checkpoint exists, unless they are up to date
python scripts/build_archives.py --only llava    build one of them
"""

import argparse
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from torchmoor.fleet import archives
from torchmoor.fleet.archives import ArchiveContents

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Archive:
    """The contents of one .mar: an entry file, a model-config and, if it serves one model, a checkpoint."""

    name: str
    entry: str  # in handlers
    config: str  # in handlers/configs
    checkpoint: str | None  # below the models directory
    made_by: str | None = None  # the script that makes a checkpoint which is not in the repository
    is_default: bool = True  # False: built only with --only


ARCHIVES = (
    Archive("llava", "chat_entry.py", "chat.yaml", "tiny-llava"),
    Archive("llm", "chat_entry.py", "chat.yaml", "smollm2", made_by="scripts/make_smollm2.py"),
    Archive("many", "many_entry.py", "many.yaml", None),
    Archive("chat", "chat_entry.py", "chat.yaml", None, is_default=False),  # for a checkpoint outside of the archive
)


def is_current(contents: ArchiveContents, target: Path) -> bool:
    """Return whether the archive has exactly these files, and neither they nor this module have changed since."""
    files = contents.names()
    try:
        built = target.stat().st_mtime
        with zipfile.ZipFile(target) as packed:
            names = set(packed.namelist()) - {archives.MANIFEST}
    except (OSError, zipfile.BadZipFile):
        return False
    return names == files.keys() and all(
        path.stat().st_mtime < built for path in [*files.values(), Path(archives.__file__)]
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[a.name for a in ARCHIVES], help="build only this archive")
    parser.add_argument("--models-dir", type=Path, default=ROOT / "models", help="folder of the checkpoints")
    parser.add_argument("--model-store", type=Path, default=ROOT / "model_store", help="folder of the archives")
    options = parser.parse_args()
    for archive in ARCHIVES:
        if not archive.is_default if options.only is None else archive.name not in options.only:
            continue
        checkpoint = None if archive.checkpoint is None else (options.models_dir / archive.checkpoint).resolve()
        target = options.model_store / f"{archive.name}.mar"
        shown = target.resolve().relative_to(Path.cwd()) if target.resolve().is_relative_to(Path.cwd()) else target
        if checkpoint is not None and not (checkpoint / "config.json").is_file():
            hint = f"; {archive.made_by} makes it" if archive.made_by else ""
            reason = f"{shown} is not built: there is no checkpoint in {checkpoint}{hint}"
            if options.only is not None or archive.made_by is None:
                raise SystemExit(f"build_archives: {reason}")
            say(reason)
            continue
        contents = archives.make_contents(archive.entry, archive.config, checkpoint)
        if is_current(contents, target):
            say(f"{shown}  up to date")
        else:
            try:
                archives.write_archive(contents, archive.name, target)
            except OSError as error:
                raise SystemExit(f"build_archives: {shown} cannot be written: {error.strerror or error}") from error
            say(f"{shown}  {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
