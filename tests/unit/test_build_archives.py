"""The archives of model_store/: their content, and when they are built."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.build_archives import ARCHIVES
from torchmoor.errors import LaunchError
from torchmoor.fleet.archive_checks import check_archives
from torchmoor.fleet.archives import MANIFEST, ArchiveContents, make_contents, write_archive
from torchmoor.fleet.torchserve import Launch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Create a folder with an empty checkpoint in the demo model's place, and no SmolLM2."""
    folder = tmp_path / "models" / "tiny-llava"
    (folder / "samples").mkdir(parents=True)
    (folder / "samples" / "picture.png").touch()
    for name in ("config.json", "model.safetensors", "README.md"):
        (folder / name).write_text(name)
    return folder.parent


def build(models: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    folders = ("--models-dir", str(models), "--model-store", str(models.parent / "store"))
    command = [sys.executable, str(ROOT / "scripts" / "build_archives.py"), *folders, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def names(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as packed:
        return set(packed.namelist())


def test_an_archive_has_code_weights_and_configuration(models: Path) -> None:
    """An archive has files in the folders where the worker looks for them, and nothing else."""
    result = build(models)

    assert result.returncode == 0, result.stderr
    found = names(models.parent / "store" / "llava.mar")
    assert {
        "chat_entry.py",
        "chat.yaml",
        "handlers/torchserve/start_chat.py",
        "torchmoor/__init__.py",
        "torchmoor/wire/headers.py",
        "model/config.json",
        "model/model.safetensors",
    } <= found
    assert not [name for name in found if "samples" in name or "README" in name or "__pycache__" in name]
    assert "handlers/chat_entry.py" not in found
    assert not [
        name for name in found if name.startswith("torchmoor/") and "__init__" not in name and "wire" not in name
    ]
    assert {path.name for path in (models.parent / "store").iterdir()} == {"llava.mar", "many.mar"}
    assert not [name for name in names(models.parent / "store" / "many.mar") if name.startswith("model/")]


def test_a_checkpoint_that_is_not_there_stops_only_its_own_archive(models: Path) -> None:
    """Without SmolLM2, which needs network, the other archives are built, and a line names the script that makes it."""
    result = build(models)

    assert result.returncode == 0
    assert "llm.mar is not built" in result.stderr
    assert "scripts/make_smollm2.py" in result.stderr

    assert build(models, "--only", "llm").returncode == 1


def test_archive_that_cannot_be_written_is_named(models: Path) -> None:
    """A checkout of another user, or a full disk, is explained in one line."""
    store = models.parent / "store"
    store.write_text("a file")

    result = build(models)

    assert result.returncode == 1
    assert result.stderr == f"build_archives: {store}/llava.mar cannot be written: File exists\n"


def test_an_archive_that_is_up_to_date_is_not_built_again(models: Path) -> None:
    """A changed, a new or a removed file causes a new build."""
    archive = models.parent / "store" / "llava.mar"
    weights = models / "tiny-llava" / "model.safetensors"

    build(models)
    assert "up to date" in build(models, "--only", "llava").stderr
    weights.write_text("other weights")
    future = archive.stat().st_mtime + 1
    os.utime(weights, (future, future))
    assert "up to date" not in build(models, "--only", "llava").stderr
    os.utime(weights, (future - 3600, future - 3600))
    assert "up to date" in build(models, "--only", "llava").stderr
    weights.rename(weights.with_name("renamed.safetensors"))
    assert "up to date" not in build(models, "--only", "llava").stderr
    assert "model/renamed.safetensors" in names(archive)


def test_a_damaged_archive_is_built_again(models: Path) -> None:
    archive = models.parent / "store" / "llava.mar"
    build(models)
    archive.write_bytes(archive.read_bytes()[:1000])

    assert build(models).returncode == 0

    assert "model/config.json" in names(archive)


def test_every_archive_has_its_entry_and_configuration() -> None:
    for archive in ARCHIVES:
        contents = make_contents(archive.entry, archive.config)
        assert contents.entry.is_file()
        assert contents.config.is_file()


def test_an_archive_is_the_same_each_time(tmp_path: Path) -> None:
    """Two archives of the same files have the same bytes, and TorchServe's manifest."""
    contents = make_contents("chat_entry.py", "chat.yaml", ROOT / "models" / "tiny-llava")

    write_archive(contents, "mine", tmp_path / "one.mar")
    write_archive(contents, "mine", tmp_path / "two.mar")

    assert (tmp_path / "one.mar").read_bytes() == (tmp_path / "two.mar").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.mar") as packed:
        manifest = json.loads(packed.read("MAR-INF/MANIFEST.json"))
    assert manifest["model"]["modelName"] == "mine"
    assert manifest["model"]["handler"] == "chat_entry.py"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("cut", "it is not a complete archive"),
        ("spoilt", r"it cannot be read \(error: Error -3 while decompressing data"),
        ("encrypted", r"it cannot be read \(RuntimeError: .* is encrypted"),
    ],
)
def test_a_damaged_archive_is_refused_before_the_start(tmp_path: Path, damage: str, reason: str) -> None:
    """Instead of an instance that starts, fails and starts again."""
    path = tmp_path / "bad.mar"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(MANIFEST, '{"model": {"handler": "start.py"}}')
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-10:]
    elif damage == "spoilt":
        begin = 30 + len(MANIFEST)  # of the compressed data
        data[begin : begin + 8] = b"\xff" * 8
    else:
        for head, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            data[data.index(head) + flags] |= 1
    path.write_bytes(data)

    with pytest.raises(LaunchError, match=rf"bad\.mar: {reason}"):
        check_archives(tmp_path, [Launch("bad", "bad", "bad.mar", None)])


@pytest.mark.parametrize("name", ["handlers/engine/contract.py", "handlers/absent.py", "torchmoor/wire/headers.py"])
def test_an_archive_with_other_handlers_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """A change of the code does not reach an archive that was built before; it is served all the same."""
    contents = make_contents("chat_entry.py", "chat.yaml")
    changed = tmp_path / "changed.py"
    changed.write_text("# another version\n")
    write_archive(contents, "current", tmp_path / "current.mar")
    other = ArchiveContents(contents.entry, contents.config, {**contents.files, name: changed})
    write_archive(other, "other", tmp_path / "other.mar")

    check_archives(
        tmp_path,
        [Launch(f"{archive}{n}", archive, f"{archive}.mar", None) for archive in ("current", "other") for n in (0, 1)],
    )

    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{tmp_path / 'other.mar'} has other handlers than this torchmoor")
