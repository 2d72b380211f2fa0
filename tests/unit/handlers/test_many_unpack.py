"""Unpacking of archives, hostile ones included."""

import gzip
import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handlers.errors import HandlerError, LoadTimedOut, ModelBroken, OutOfDisk
from handlers.many.folder import find_model_folder
from handlers.many.model import LoadProgress
from handlers.many.unpack import unpack_tar, unpack_zip
from handlers.settings.many import ManySettings

Member = tuple[str, bytes] | tarfile.TarInfo


def tar_of(*members: Member) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return buffer.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def unpack(archive: bytes, into: Path, progress: LoadProgress | None = None, **limits: Any) -> list[str]:
    taken: list[int] = []
    settings = ManySettings(**limits)
    unpack_tar(io.BytesIO(archive), len(archive), into, settings, taken.append, progress or LoadProgress())
    files = [path for path in into.rglob("*") if path.is_file()]
    assert sum(taken) == sum(path.stat().st_size for path in files)
    return sorted(str(path.relative_to(into)) for path in files)


@pytest.fixture
def into(tmp_path: Path) -> Path:
    folder = tmp_path / "deep" / "into"
    folder.mkdir(parents=True)
    return folder


def test_files_come_out_as_they_went_in(into: Path) -> None:
    """SageMaker's code and macOS metadata are skipped and never run."""
    archive = tar_of(
        ("model/config.json", b"{}"),
        ("model/sub/vocab.txt", b"a\nb"),
        ("code/inference.py", b"import os"),
        ("model/code/inference.py", b"import os"),
        ("._model", b"mac"),
    )

    names = unpack(archive, into)

    assert names == ["model/config.json", "model/sub/vocab.txt"]
    assert (into / "model/sub/vocab.txt").read_bytes() == b"a\nb"


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (("../evil", b"x"), "not a path below"),
        (("a/../../evil", b"x"), "not a path below"),
        (("/tmp/evil", b"x"), "not a path below"),
        (("a\\..\\evil", b"x"), "not a path below"),
        (("/".join("a" * 40), b"x"), "not a path below"),
        (special("link", tarfile.SYMTYPE, "/etc/passwd"), "is a link"),
        (special("link", tarfile.LNKTYPE, "config.json"), "is a link"),
        (special("pipe", tarfile.FIFOTYPE), "is a device"),
        (special("null", tarfile.CHRTYPE), "is a device"),
        (special("disk", tarfile.BLKTYPE), "is a device"),
        (special("code/link", tarfile.SYMTYPE, "/etc/passwd"), "is a link"),
        (("config.json", b"again"), "twice"),
        (("config.json/x", b"again"), "both a file and a folder"),
        ((".", b"x"), "both a file and a folder"),
        (("a" * 256, b"x"), "not a path below"),
        (("a" * 256 + "/b", b"x"), "not a path below"),
    ],
)
def test_what_is_no_file_below_the_top_is_refused(into: Path, member: Member, reason: str) -> None:
    """Files are never written outside the folder, and links are never created."""
    with pytest.raises(ModelBroken, match=reason):
        unpack(tar_of(("config.json", b"{}"), member), into)

    assert [path.name for path in into.parent.parent.rglob("*") if path.is_file()] == ["config.json"]
    assert not any(path.is_symlink() for path in into.rglob("*"))


def test_sizes_counts_and_ratio_are_limited(into: Path) -> None:
    """The limits count skipped members and do not trust the archive's own numbers."""
    bomb = tar_of(("code/zeros", bytes(64 << 20)))
    with pytest.raises(ModelBroken, match="max_ratio"):
        unpack(bomb, into)
    with pytest.raises(ModelBroken, match="max_unpacked_bytes"):
        unpack(tar_of(("a", os.urandom(5000))), into, max_unpacked_bytes=4000)
    with pytest.raises(ModelBroken, match="max_files"):
        unpack(tar_of(*((f"f{number}", b"") for number in range(11))), into, max_files=10)


def test_a_header_that_would_fill_the_memory_is_refused(into: Path) -> None:
    """Python reads a long member name into memory, so its length is limited."""
    info = special("././@LongLink", tarfile.GNUTYPE_LONGNAME)
    info.size = 1 << 30

    with pytest.raises(ModelBroken, match="header"):
        unpack(gzip.compress(info.tobuf()), into)


def test_headers_before_headers_are_refused(into: Path) -> None:
    """Python reads a header that follows a member's longer name by recursion."""
    info = special("././@LongLink", tarfile.GNUTYPE_LONGNAME)
    info.size = 4
    chain = (info.tobuf() + b"abc".ljust(512, b"\0")) * 2000

    with pytest.raises(ModelBroken, match="damaged"):
        unpack(gzip.compress(chain + special("x", tarfile.REGTYPE).tobuf() + bytes(1024)), into)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-4] + b"\0\0\0\1",
        lambda data: data[:-8] + b"\1\2\3\4" + data[-4:],
        lambda data: b"<html>not found</html>",
        lambda data: b"",
        lambda data: gzip.compress(b"no tar at all" * 100),
        lambda data: data[:200] + bytes(50) + data[250:],
    ],
    ids=["cut", "length", "checksum", "html", "empty", "no-tar", "zeros"],
)
def test_a_damaged_archive_is_told_with_its_reason(into: Path, spoil: Callable[[bytes], bytes]) -> None:
    """A damaged archive, as of a failed upload, is refused with the reason."""
    with pytest.raises(ModelBroken, match=r"damaged|is not a \.tar\.gz"):  # prose: allow
        unpack(spoil(tar_of(("config.json", b"{}"), ("w", os.urandom(5000)))), into)


def test_unpacking_ends_in_time(into: Path) -> None:
    """Unpacking stops at its time limit."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1
        return now

    progress = LoadProgress(clock)
    progress.allow(10)

    with pytest.raises(LoadTimedOut):
        unpack(tar_of(("w", os.urandom(12 << 20))), into, progress)


def test_no_room_is_asked_for_beyond_the_limits(into: Path) -> None:
    """Space is requested within the limits, whatever size a header declares, so that other models stay on disk."""
    huge = tarfile.TarInfo("model.safetensors")
    taken: list[int] = []
    for size, limit in ((1 << 50, "max_unpacked_bytes"), (1 << 30, "max_ratio")):
        huge.size = size
        archive = tar_of(huge)
        with pytest.raises(ModelBroken, match=limit):
            unpack_tar(io.BytesIO(archive), len(archive), into, ManySettings(), taken.append, LoadProgress())

    assert taken == []


def test_room_is_asked_for_before_a_byte_is_written(into: Path) -> None:
    """Disk space is reserved before the first byte is written."""
    archive = tar_of(("w", b"x" * 5000))

    def take(num_bytes: int) -> None:
        raise OutOfDisk(f"no room for {num_bytes}")

    with pytest.raises(OutOfDisk, match="5000"):
        unpack_tar(io.BytesIO(archive), len(archive), into, ManySettings(), take, LoadProgress())

    assert list(into.iterdir()) == []


def zip_of(path: Path, members: dict[str, bytes], mode: int = 0o100644) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            bundle.writestr(info, content)
    return path


def test_a_mar_is_unpacked_like_any_archive(tmp_path: Path, into: Path) -> None:
    """A .mar is a zip with TorchServe's manifest in it."""
    mar = zip_of(tmp_path / "m.mar", {"config.json": b"{}", "MAR-INF/MANIFEST.json": b"{}", "code/x.py": b""})

    unpack_zip(mar, into, ManySettings(), lambda num_bytes: None, LoadProgress())

    assert (into / "config.json").read_bytes() == b"{}"
    assert not (into / "code").exists()


@pytest.mark.parametrize(
    ("members", "mode", "limits", "reason"),
    [
        ({"../evil": b"x"}, 0o100644, {}, "not a path below"),
        ({"link": b"/etc/passwd"}, 0o120777, {}, "is a link"),
        ({"null": b""}, 0o020666, {}, "is a device"),
        ({"disk": b""}, 0o060666, {}, "is a device"),
        ({"pipe": b""}, 0o010666, {}, "is a device"),
        ({"zeros": bytes(64 << 20)}, 0o100644, {}, "max_ratio"),
        ({"a": b"", "b": b""}, 0o100644, {"max_files": 1}, "max_files"),
        ({"a": b"12345"}, 0o100644, {"max_unpacked_bytes": 4}, "max_unpacked_bytes"),
    ],
)
def test_a_mar_is_not_trusted_either(
    tmp_path: Path, into: Path, members: dict[str, bytes], mode: int, limits: dict[str, Any], reason: str
) -> None:
    """A .mar has the same limits and errors."""
    mar = zip_of(tmp_path / "m.mar", members, mode)

    with pytest.raises(ModelBroken, match=reason):
        unpack_zip(mar, into, ManySettings(**limits), lambda num_bytes: None, LoadProgress())


def test_a_mar_that_lies_or_is_damaged_is_told_with_its_reason(tmp_path: Path, into: Path) -> None:
    """A wrong checksum, a truncated file, and a directory made to exhaust memory are refused with the reason."""
    good = zip_of(tmp_path / "m.mar", {"config.json": os.urandom(1000)}).read_bytes()
    lies = good[:500] + bytes(50) + good[550:]
    vast = zip_of(tmp_path / "v.mar", {f"{number:060000d}": b"" for number in range(80)}).read_bytes()
    for content in (lies, good[:-30], b"", vast):
        (tmp_path / "x.mar").write_bytes(content)
        with pytest.raises(HandlerError, match=r"damaged|larger than any"):
            unpack_zip(tmp_path / "x.mar", into, ManySettings(), lambda num_bytes: None, LoadProgress())


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_damaged_bytes_of_each_method_are_told(method: int, tmp_path: Path, into: Path) -> None:
    """Each method of a zip has errors of its own."""
    with zipfile.ZipFile(tmp_path / "x.mar", "w", method) as bundle:
        bundle.writestr("config.json", os.urandom(1000))
    content = bytearray((tmp_path / "x.mar").read_bytes())
    content[60:400] = bytes(340)
    (tmp_path / "x.mar").write_bytes(content)

    with pytest.raises(ModelBroken, match="damaged"):
        unpack_zip(tmp_path / "x.mar", into, ManySettings(), lambda num_bytes: None, LoadProgress())


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["config.json"], "."),
        (["model/config.json", "code/config.json"], "model"),
        (["anything/config.json"], "anything"),
        (["config.pbtxt", "1/model.pt"], "."),
        (["model.pt"], "."),
    ],
)
def test_the_model_is_found_at_the_top_or_in_one_folder(tmp_path: Path, files: list[str], found: str) -> None:
    """The layouts of transformers, SageMaker and Triton are found."""
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")

    assert find_model_folder(tmp_path) == tmp_path / found


def test_a_folder_without_one_model_says_what_it_has(tmp_path: Path) -> None:
    """The error lists the folder's content."""
    with pytest.raises(ModelBroken, match="there is nothing"):
        find_model_folder(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(ModelBroken, match="2 models in it: a, b"):
        find_model_folder(tmp_path)
