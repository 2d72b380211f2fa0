"""Build the .mar archives of model_store/: handler code, weights and settings in one file each.

python scripts/build_archives.py                 all archives whose checkpoint is there; nothing that is up to date
python scripts/build_archives.py --only llava    one of them
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT / "torchmoor" / "wire"  # what handlers and proxy share
NOT_SERVED = {"samples", "README.md"}  # what a checkpoint's folder has beside the checkpoint


@dataclass(frozen=True, slots=True)
class Archive:
    """What goes into one .mar: an entry file, a model-config, a checkpoint directory if it serves only one."""

    name: str
    entry: str
    config: str  # in handlers/configs
    checkpoint: str | None  # below the models directory
    made_by: str | None = None  # the script that makes the checkpoint, where it is not in the repository
    is_usual: bool = True  # False: built only when it is asked for

    @property
    def entry_file(self) -> Path:
        return ROOT / "handlers" / self.entry

    @property
    def config_file(self) -> Path:
        return ROOT / "handlers" / "configs" / self.config


ARCHIVES = (
    Archive("llava", "chat_entry.py", "chat.yaml", "tiny-llava"),
    Archive("llm", "chat_entry.py", "chat.yaml", "smollm2", made_by="scripts/make_smollm2.py"),
    Archive("many", "many_entry.py", "many.yaml", None),
    Archive("chat", "chat_entry.py", "chat.yaml", None, is_usual=False),  # of a checkpoint that lies somewhere else
)


def contents(archive: Archive, checkpoint: Path | None) -> dict[str, Path]:
    """The files that keep their folders inside the archive, by their names there."""
    sources = [*(ROOT / "handlers").rglob("*"), ROOT / "torchmoor" / "__init__.py", *SHARED.rglob("*")]
    code = {
        path.relative_to(ROOT).as_posix(): path
        for path in sources
        if path.is_file() and not {"__pycache__", "configs"} & set(path.parts) and path != archive.entry_file
    }
    given = [] if checkpoint is None else checkpoint.iterdir()
    weights = {f"model/{path.name}": path for path in given if path.name not in NOT_SERVED}
    return {**code, **weights}


def is_current(archive: Archive, files: dict[str, Path], target: Path) -> bool:
    """Whether the archive has exactly these files and none of them, nor this script, has changed since."""
    sources = [*files.values(), archive.entry_file, archive.config_file, Path(__file__)]
    try:
        built = target.stat().st_mtime
        with zipfile.ZipFile(target) as packed:
            names = {name for name in packed.namelist() if name.startswith(("handlers/", "torchmoor/", "model/"))}
    except (OSError, zipfile.BadZipFile):
        return False
    return names == files.keys() and all(path.stat().st_mtime < built for path in sources)


def build(archive: Archive, files: dict[str, Path], store: Path) -> Path:
    """Write `store/name.mar`; an archive that exists is replaced only when the new one is complete.

    The archiver flattens a directory that it is given, so everything that must keep its folder is staged, as links,
    inside one parent directory, and the parent is given. Nothing is compressed: weights do not shrink.
    """
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{archive.name}-", suffix=".partial", dir=store) as temporary:
        stage = Path(temporary) / "stage"
        for name, path in files.items():
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            (stage / name).symlink_to(path)
        command = [
            *(str(Path(sys.executable).with_name("torch-model-archiver")), "--force"),
            *("--archive-format", "zip-store", "--model-name", archive.name, "--version", "1.0"),
            *("--handler", str(archive.entry_file), "--config-file", str(archive.config_file)),
            *("--extra-files", str(stage), "--export-path", temporary),
        ]
        own = {**os.environ, "TMPDIR": temporary}  # the archiver works in a folder there that it names after the model
        subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL, env=own)
        return (Path(temporary) / f"{archive.name}.mar").rename(store / f"{archive.name}.mar")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[a.name for a in ARCHIVES], help="build only this archive")
    parser.add_argument("--models-dir", type=Path, default=ROOT / "models", help="where the checkpoints are")
    parser.add_argument("--model-store", type=Path, default=ROOT / "model_store", help="where the archives go")
    options = parser.parse_args()
    for archive in ARCHIVES:
        if not archive.is_usual if options.only is None else archive.name not in options.only:
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
        files = contents(archive, checkpoint)
        if is_current(archive, files, target):
            say(f"{shown}  up to date")
        else:
            build(archive, files, options.model_store)
            say(f"{shown}  {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
