"""Packed models made to exhaust a disk or the memory of the reading process."""

import gzip
import io
import json
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from torchmoor.errors import ConfigError
from torchmoor.fleet import packed_models
from torchmoor.fleet.archives import MANIFEST
from torchmoor.fleet.packed_models import MAX_MANIFEST_BYTES, read_name, unpack


def pack(folder: Path, kind: str, files: dict[str, bytes]) -> Path:
    """Create a packed model with these files."""
    path = folder / f"model{kind}"
    if kind == ".mar":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
            for name, data in files.items():
                bundle.writestr(name, data)
        return path
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("kind", [".mar", ".tar.gz"])
def test_a_bomb_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A few kB that expand to far more are refused; a small model may have any compression ratio."""
    zeros = {f"{number}.bin": bytes(1 << 20) for number in range(4)}
    packed = pack(tmp_path, kind, zeros)
    unpack(packed, tmp_path / "small")
    monkeypatch.setattr(packed_models, "SMALL_BYTES", 1 << 20)

    with pytest.raises(ConfigError, match="is more than 200 times as long unpacked"):
        unpack(packed, tmp_path / "bomb")

    assert (tmp_path / "small" / "3.bin").stat().st_size == 1 << 20
    assert not (tmp_path / "bomb").exists()


@pytest.mark.parametrize("kind", [".mar", ".tar.gz"])
def test_too_many_files_are_refused_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Too many files, even empty ones, are refused, because they would use up the disk's inodes."""
    monkeypatch.setattr(packed_models, "MAX_FILES", 3)
    packed = pack(tmp_path, kind, {str(number): b"" for number in range(4)})

    with pytest.raises(ConfigError, match="has more than 3 files"):
        unpack(packed, tmp_path / "bomb")

    assert not (tmp_path / "bomb").exists()


@pytest.mark.parametrize("prefix", ["", "./", "x/../", "../"])
def test_a_path_out_of_the_target_writes_nothing_there(tmp_path: Path, prefix: str) -> None:
    """A path out of the target is refused, also an absolute one behind a prefix that tar writes."""
    outside = tmp_path / "outside"
    outside.mkdir()
    packed = pack(tmp_path, ".tar.gz", {f"{prefix}{outside}/file": b"x"})

    with pytest.raises(ConfigError, match="is not a regular file or folder"):
        unpack(packed, tmp_path / "unpacked")

    assert list(outside.iterdir()) == []
    assert not (tmp_path / "unpacked").exists()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_archive_is_named_and_leaves_nothing(tmp_path: Path, compression: int) -> None:
    """The error names the archive, for each decompressor's own exceptions."""
    packed = tmp_path / "model.mar"
    with zipfile.ZipFile(packed, "w", compression) as bundle:
        bundle.writestr("data", bytes(range(256)) * 16)
    damaged = bytearray(packed.read_bytes())
    damaged[60:90] = bytes(each ^ 0xFF for each in damaged[60:90])
    packed.write_bytes(damaged)

    with pytest.raises(ConfigError, match=r"model\.mar cannot be unpacked"):
        unpack(packed, tmp_path / "unpacked")

    assert not (tmp_path / "unpacked").exists()


def test_a_manifest_is_read_up_to_its_limit(tmp_path: Path) -> None:
    """A manifest is read up to its limit, so that a sparse file or deep nesting uses no memory."""
    manifest = tmp_path / Path(MANIFEST).name
    with manifest.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=f"has more than {MAX_MANIFEST_BYTES} bytes"):
        read_name(manifest)

    manifest.write_bytes(b"[" * 100_000)
    with pytest.raises(ConfigError, match="is not a manifest"):
        read_name(manifest)

    manifest.write_text(json.dumps({"model": {"modelName": "llava"}}))
    assert read_name(manifest) == "llava"


def tar_header(kind: bytes, num_bytes: int) -> bytes:
    info = tarfile.TarInfo("x")
    info.size, info.type = num_bytes, kind
    return info.tobuf(tarfile.GNU_FORMAT)


PAX_MAP = b"30 GNU.sparse.name=sparse.bin\n22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n25 GNU.sparse.realsize=9\n"
BOMBS = {
    "long header": [tar_header(tarfile.XHDTYPE, 32 << 20), b"a" * (32 << 20)],
    "long name": [tar_header(tarfile.GNUTYPE_LONGNAME, 32 << 20), b"a" * (32 << 20)],
    "sparse": [tar_header(tarfile.GNUTYPE_SPARSE, 0)],
    "sparse by its header": [
        tar_header(tarfile.XHDTYPE, len(PAX_MAP)) + PAX_MAP.ljust(512, b"\0"),
        tar_header(tarfile.REGTYPE, 32 << 20) + b"9999999\n" + b"1\n" * (16 << 20),
    ],
}


@pytest.mark.parametrize("name", BOMBS)
def test_headers_that_fill_the_memory_are_refused(tmp_path: Path, name: str) -> None:
    """Long headers are refused before Python reads them into memory: 700 kB took 715 MB and 98 s."""
    packed = tmp_path / "model.tar.gz"
    with gzip.open(packed, "wb", compresslevel=1) as file:
        for piece in BOMBS[name]:
            file.write(piece)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"a header of more than|a sparse file"):
            unpack(packed, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 4 << 20
    assert not (tmp_path / "out").exists()


def test_a_directory_that_fills_the_memory_is_refused(tmp_path: Path) -> None:
    """A zip with a large directory is refused, because each entry takes many times its bytes in memory."""
    packed = tmp_path / "model.mar"
    with zipfile.ZipFile(packed, "w") as bundle:
        bundle.writestr("a", b"")
        bundle.comment = b""
        for number in range(200):
            info = zipfile.ZipInfo(f"{number}")
            info.comment = bytes(60_000)
            bundle.writestr(info, b"")

    with pytest.raises(ConfigError, match="directory is larger than any model's"):
        unpack(packed, tmp_path / "out")
    assert not (tmp_path / "out").exists()
