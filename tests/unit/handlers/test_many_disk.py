"""Sources of models and their unpacked folders: the same for a directory and for S3."""

import errno
import io
import os
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from handlers.errors import LoadTimedOut, ModelBroken, ModelUnknown, OutOfDisk, SettingsError, SourceUnavailable
from handlers.many.model import LoadProgress
from handlers.many.residency.disk_cache import MARKER, PARTIAL, SPARE_BYTES, DiskCache, take_home
from handlers.many.residency.download import Downloader
from handlers.many.residency.loader_threads import weights_bytes
from handlers.many.sources.directory import find_in
from handlers.many.sources.given import GivenSource
from handlers.many.sources.open import open_source
from handlers.many.sources.s3 import open_s3
from handlers.many.sources.source import Find, Replaced, SourceModel, check_name
from handlers.settings.many import ManySettings
from tests.servers import BUCKET, LossyProxy, run_s3, run_silent_server
from tests.waiting import wait_until


def archive_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def model(weights: bytes = b"w" * 1000) -> bytes:
    return archive_of({"config.json": b"{}", "model.safetensors": weights})


@dataclass
class Place:
    """A storage location and the source that reads it."""

    find: Find
    put: Callable[[str, bytes], None]
    remove: Callable[[str], None]
    settings: ManySettings
    home: Path
    downloaders: list[Downloader] = field(default_factory=list)

    def downloader(self, source: str | None = None, **limits: Any) -> Downloader:
        """Return a worker's downloader. source: a different one, of another worker that uses the same folder."""
        settings = ManySettings(source=self.settings.source, **limits)
        disk = DiskCache(self.home, settings.disk_bytes, source or settings.source)
        self.downloaders.append(Downloader(disk, self.find, settings))
        return self.downloaders[-1]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with run_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def directory(tmp_path: Path) -> Place:
    root = tmp_path / "models"
    root.mkdir()
    (tmp_path / "home").mkdir()
    settings = ManySettings(source=str(root), max_files=100)

    def put(name: str, content: bytes) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "new").write_bytes(content)
        (root / "new").replace(root / name)

    def remove(name: str) -> None:
        (root / name).unlink()

    return Place(open_source(settings, tmp_path).find, put, remove, settings, tmp_path / "home")


@pytest.fixture
def bucket(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    s3.use_in(monkeypatch)
    client = s3.client()
    prefix = tmp_path.name
    (tmp_path / "home").mkdir()
    settings = ManySettings(source=f"s3://{BUCKET}/{prefix}", max_files=100)

    def put(name: str, content: bytes) -> None:
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=content)

    def remove(name: str) -> None:
        client.delete_object(Bucket=BUCKET, Key=f"{prefix}/{name}")

    return Place(open_s3(settings).find, put, remove, settings, tmp_path / "home")


@pytest.fixture(params=["directory", pytest.param("bucket", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Provide each kind of place; at the end no partial files are left and the counts are right."""
    place: Place = request.getfixturevalue(request.param)
    yield place
    assert [path.name for path in place.home.iterdir() if path.name.startswith(PARTIAL)] == []
    for downloader in place.downloaders[-1:]:
        downloader.disk.check_integrity()


def test_an_archive_is_unpacked_once(place: Place) -> None:
    """The second request, and another worker's start, find the unpacked folder."""
    place.put("a/m.tar.gz", model())
    downloader = place.downloader()

    first = downloader.fetch("a/m.tar.gz", LoadProgress())
    second = downloader.fetch("a/m.tar.gz", LoadProgress())
    restarted = place.downloader()
    third = restarted.fetch("a/m.tar.gz", LoadProgress())

    assert (first.folder / "model.safetensors").read_bytes() == b"w" * 1000
    assert first.folder == second.folder == third.folder
    assert [lease.is_new for lease in (first, second, third)] == [True, False, False]
    assert downloader.disk.budget.used_bytes == restarted.disk.budget.used_bytes == 1002


def test_a_model_that_is_added_or_replaced_is_found(place: Place) -> None:
    """A new version is found while the worker runs; a lease keeps the old one."""
    downloader = place.downloader()
    with pytest.raises(ModelUnknown):
        downloader.fetch("m.tar.gz", LoadProgress())

    place.put("m.tar.gz", model(b"old"))
    old = downloader.fetch("m.tar.gz", LoadProgress())
    place.put("m.tar.gz", model(b"new"))
    new = downloader.fetch("m.tar.gz", LoadProgress())
    place.remove("m.tar.gz")

    assert (old.folder / "model.safetensors").read_bytes() == b"old"
    assert (new.folder / "model.safetensors").read_bytes() == b"new"
    assert old.version != new.version
    with pytest.raises(ModelUnknown):
        downloader.fetch("m.tar.gz", LoadProgress())


def test_a_folder_is_a_model_too(place: Place) -> None:
    """A folder of files is a model; a replaced file makes another version."""
    place.put("team/m/config.json", b"{}")
    place.put("team/m/model.safetensors", b"one")
    place.put("team/m/.cache/junk", b"x")
    downloader = place.downloader()

    one = downloader.fetch("team/m", LoadProgress())
    place.put("team/m/model.safetensors", b"two")
    two = downloader.fetch("team/m", LoadProgress())

    assert (two.folder / "model.safetensors").read_bytes() == b"two"
    assert one.version != two.version


def test_a_plain_folder_is_used_where_it_is(directory: Place) -> None:
    """A plain folder is neither copied nor counted."""
    directory.put("m/config.json", b"{}")
    downloader = directory.downloader()

    lease = downloader.fetch("m", LoadProgress())

    assert lease.folder == Path(directory.settings.source) / "m"
    assert downloader.disk.budget.used_bytes == 0


def test_a_link_to_nothing_is_no_file_of_a_folder(directory: Place) -> None:
    """A link without a target, or a file that is deleted while the folder is read, is left out of the model."""
    directory.put("m/config.json", b"{}")
    version = directory.find("m").version
    (Path(directory.settings.source) / "m" / "old.json").symlink_to("nowhere")

    assert directory.find("m").version == version


def test_the_least_recently_used_folder_goes_first_and_a_leased_one_never(place: Place) -> None:
    """The budget counts unpacked folders; if all are in use, a load is refused for lack of space."""
    for name in "abcd":
        place.put(f"{name}.tar.gz", model())
    downloader = place.downloader(disk_bytes=2500)
    leases = {name: downloader.fetch(f"{name}.tar.gz", LoadProgress()) for name in "ab"}

    with pytest.raises(OutOfDisk, match="disk_bytes"):
        downloader.fetch("c.tar.gz", LoadProgress())
    for lease in leases.values():
        lease.release()
        lease.release()
    downloader.fetch("a.tar.gz", LoadProgress()).release()
    downloader.fetch("c.tar.gz", LoadProgress())

    assert [name for name, _, _ in downloader.disk.models()] == ["a.tar.gz", "c.tar.gz"]
    assert not leases["b"].folder.exists()
    assert downloader.disk.budget.used_bytes == 2004


def test_a_full_disk_is_told_and_harms_nobody(directory: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is smaller or fuller than the budget allows fails only the one load."""
    directory.put("a.tar.gz", model())
    directory.put("b.tar.gz", model())
    downloader = directory.downloader()
    held = downloader.fetch("a.tar.gz", LoadProgress())
    usage = shutil.disk_usage(directory.home)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))

    with pytest.raises(OutOfDisk, match="only 1000 bytes left, and 67108864 must stay free"):
        downloader.fetch("b.tar.gz", LoadProgress())

    assert (held.folder / "config.json").exists()
    assert [name for name, _, _ in downloader.disk.models()] == ["a.tar.gz"]
    assert downloader.disk.budget.used_bytes == 1002
    assert not list(directory.home.glob(f"{PARTIAL}*"))


def test_a_linked_folder_belongs_to_a_model(directory: Place, tmp_path: Path) -> None:
    """A folder that a link in the model's folder leads to counts for its version and its memory, once."""
    directory.put("m/config.pbtxt", b"")
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.pt").write_bytes(b"w" * 1000)
    folder = Path(directory.settings.source) / "m"
    before = directory.find("m").version
    (folder / "1").symlink_to(weights)
    (weights / "again").symlink_to(weights)
    (weights / "up").symlink_to(folder)

    linked = directory.find("m")
    (weights / "model.pt").write_bytes(b"x" * 1000)

    assert [file.path for file in linked.files] == ["config.pbtxt", "1/model.pt"]
    assert len({before, linked.version, directory.find("m").version}) == 3
    assert weights_bytes(folder) == 1000


@pytest.mark.parametrize("is_full", [False, True])
def test_no_model_leaves_the_disk_for_one_that_does_not_fit(
    directory: Place, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """A file beyond the budget, or beyond what the file system has left, is refused; the unpacked models stay."""
    directory.put("a.tar.gz", model())
    directory.put("b.tar.gz", model())
    directory.put("large.tar.gz", model(os.urandom(4000)))
    downloader = directory.downloader(disk_bytes=1 << 30 if is_full else 4000)
    for name in "ab":
        downloader.fetch(f"{name}.tar.gz", LoadProgress()).release()
    if is_full:
        usage = shutil.disk_usage(directory.home)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=SPARE_BYTES + 1000))

    with pytest.raises(OutOfDisk):
        downloader.fetch("large.tar.gz", LoadProgress())

    assert [name for name, _, _ in downloader.disk.models()] == ["a.tar.gz", "b.tar.gz"]
    downloader.disk.check_integrity()


def test_room_that_is_being_made_is_waited_for(directory: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one load deletes the only model without a lease, another one waits for the room that this makes."""
    for name in "abc":
        directory.put(f"{name}.tar.gz", model())
    downloader = directory.downloader(disk_bytes=2500)
    downloader.fetch("a.tar.gz", LoadProgress()).release()
    downloader.fetch("b.tar.gz", LoadProgress())
    has_begun, may_end, looks, rmtree, usage = (
        threading.Event(),
        threading.Event(),
        [],
        shutil.rmtree,
        shutil.disk_usage,
    )

    def delete(path: Path, **options: Any) -> None:
        if (path / MARKER).exists():
            has_begun.set()
            assert may_end.wait(30)
        rmtree(path, **options)

    def look(path: Path) -> Any:
        looks.append(threading.get_ident())
        return usage(path)

    monkeypatch.setattr(shutil, "rmtree", delete)
    monkeypatch.setattr(shutil, "disk_usage", look)
    disk = downloader.disk
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(disk.make_room, 700)
        assert has_begun.wait(30)
        second = pool.submit(disk.make_room, 700)
        wait_until(lambda: second.done() or len(set(looks)) == 2, "the second one looks for room")
        may_end.set()
        first.result(30)
        second.result(30)

    assert disk.budget.used_bytes == 1002 + 2 * 700


def test_a_small_file_system_that_fills_up_is_told(directory: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own error while writing is reported; /dev/full provides a real one."""
    directory.put("a/config.json", b"{}")
    directory.put("a.tar.gz", model())
    downloader = directory.downloader()
    real_open = Path.open

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        is_weights = path.name == "model.safetensors" and arguments == ("xb",)
        return real_open(Path("/dev/full"), "wb", 0) if is_weights else real_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)

    with pytest.raises(OutOfDisk, match="is full"):
        downloader.fetch("a.tar.gz", LoadProgress())

    assert downloader.disk.budget.used_bytes == 0
    assert not list(directory.home.glob(f"{PARTIAL}*"))


def test_what_a_killed_worker_left_is_cleaned(directory: Place) -> None:
    """Partial folders, unmarked ones and those with a missing file are deleted; others stay."""
    directory.put("a.tar.gz", model())
    directory.put("b.tar.gz", model())
    downloader = directory.downloader()
    good, spoilt = (downloader.fetch(f"{name}.tar.gz", LoadProgress()) for name in "ab")
    (spoilt.folder / "model.safetensors").unlink()
    (directory.home / f"{PARTIAL}x").mkdir()
    (directory.home / "0000-1111" / "files").mkdir(parents=True)

    restarted = directory.downloader()

    assert [name for name, _, _ in restarted.disk.models()] == ["a.tar.gz"]
    assert [path.name for path in directory.home.iterdir()] == [good.folder.parent.name]


def test_a_folder_that_somebody_deleted_is_unpacked_again(directory: Place) -> None:
    directory.put("a.tar.gz", model())
    downloader = directory.downloader()
    downloader.fetch("a.tar.gz", LoadProgress()).release()
    shutil.rmtree(next(directory.home.iterdir()))

    lease = downloader.fetch("a.tar.gz", LoadProgress())

    assert (lease.folder / "model.safetensors").exists()
    downloader.disk.check_integrity()


def test_a_folder_that_somebody_deleted_gives_way_to_another(directory: Place) -> None:
    """A load succeeds although another program has deleted unpacked folders, whose bytes no longer count."""
    directory.put("a.tar.gz", model())
    directory.put("b.tar.gz", model())
    downloader = directory.downloader(disk_bytes=1500)
    downloader.fetch("a.tar.gz", LoadProgress()).release()
    shutil.rmtree(next(directory.home.iterdir()))

    lease = downloader.fetch("b.tar.gz", LoadProgress())

    assert (lease.folder / "config.json").is_file()
    downloader.disk.check_integrity()


def test_a_folder_that_somebody_deleted_is_no_reason_to_drop_what_was_unpacked_meanwhile(directory: Place) -> None:
    """If two threads unpack one version and another program deletes the first folder, the second one stays."""
    disk = directory.downloader().disk
    leases = []
    with disk.new_folder() as first, disk.new_folder() as second:
        for folder in (first, second):
            (folder.files / "config.json").write_text("{}")
            folder.take(2)
        leases.append(disk.keep(first, "m", "1", first.files))
        shutil.rmtree(leases[0].folder.parent)
        leases.append(disk.keep(second, "m", "1", second.files))

    assert (leases[1].folder / "config.json").is_file()
    disk.check_integrity()


def test_a_folder_that_somebody_deleted_does_not_stand_in_for_a_source_that_is_down(directory: Place) -> None:
    """The error is the source's, which a client may wait for, and not one of the model."""
    directory.put("a.tar.gz", model())
    downloader = directory.downloader()
    downloader.fetch("a.tar.gz", LoadProgress()).release()
    shutil.rmtree(next(directory.home.iterdir()))

    def find(name: str) -> SourceModel:
        raise SourceUnavailable("it is down")

    with pytest.raises(SourceUnavailable):
        Downloader(downloader.disk, find, directory.settings).fetch("a.tar.gz", LoadProgress())

    downloader.disk.check_integrity()


@pytest.mark.parametrize("is_latest", [False, True])
def test_a_folder_that_is_deleted_at_this_moment_is_unpacked_again(
    directory: Place, monkeypatch: pytest.MonkeyPatch, is_latest: bool
) -> None:
    """Another program may delete it whenever the cache looks at it; the model itself is not broken."""
    directory.put("a.tar.gz", model())
    downloader = directory.downloader()
    downloader.fetch("a.tar.gz", LoadProgress()).release()
    utime = os.utime

    def delete_and_touch(path: Path) -> None:
        shutil.rmtree(path.parent, ignore_errors=True)
        utime(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", delete_and_touch)
        if is_latest:
            assert downloader.disk.find_latest("a.tar.gz") is None
        [version] = {directory.find("a.tar.gz").version}
        assert downloader.disk.find("a.tar.gz", version) is None
    lease = downloader.fetch("a.tar.gz", LoadProgress())

    assert lease.is_new
    assert (lease.folder / "model.safetensors").exists()
    downloader.disk.check_integrity()


def test_a_source_that_goes_down_during_a_download_leaves_the_earlier_version(directory: Place) -> None:
    """The version on disk is used, as it is by a request that finds the source down at its beginning.

    A download whose model may have been replaced meanwhile is not kept: its files may belong to two versions.
    """
    directory.put("a.tar.gz", model(b"earlier"))
    downloader = directory.downloader()
    downloader.fetch("a.tar.gz", LoadProgress()).release()
    directory.put("a.tar.gz", model(b"newest"))
    num_looks = 0

    def find(name: str) -> SourceModel:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 2:
            raise SourceUnavailable("it is down")
        return directory.find(name)

    interrupted = Downloader(downloader.disk, find, directory.settings)
    lease = interrupted.fetch("a.tar.gz", LoadProgress())

    assert (lease.folder / "model.safetensors").read_bytes() == b"earlier"
    assert (interrupted.fetch("a.tar.gz", LoadProgress()).folder / "model.safetensors").read_bytes() == b"newest"
    downloader.disk.check_integrity()


def test_a_broken_archive_leaves_nothing_and_says_its_version(place: Place) -> None:
    """The error contains the version, so that it is remembered until the archive is replaced."""
    place.put("m.tar.gz", model()[:-20])
    downloader = place.downloader()

    with pytest.raises(ModelBroken) as caught:
        downloader.fetch("m.tar.gz", LoadProgress())

    assert caught.value.version == place.find("m.tar.gz").version
    assert downloader.disk.budget.used_bytes == 0


def test_an_archive_without_a_model_or_beyond_the_limits_is_refused(place: Place) -> None:
    """The limits are checked before the archive is read, where its size suffices."""
    place.put("empty.tar.gz", archive_of({"readme": b"hello"}))
    place.put("large.tar.gz", model(os.urandom(5000)))

    with pytest.raises(ModelBroken, match=r"no config\.json.*'readme'"):
        place.downloader().fetch("empty.tar.gz", LoadProgress())
    with pytest.raises(ModelBroken, match="max_archive_bytes"):
        place.downloader(max_archive_bytes=4000).fetch("large.tar.gz", LoadProgress())


def test_a_load_that_takes_too_long_is_ended(place: Place) -> None:
    """A load past its time limit ends during the download."""
    place.put("m.tar.gz", model())
    now = iter(range(1000))
    progress = LoadProgress(lambda: next(now))
    progress.allow(1)

    with pytest.raises(LoadTimedOut):
        place.downloader().fetch("m.tar.gz", progress)


def test_several_workers_of_a_host_do_not_share_a_folder(tmp_path: Path) -> None:
    """Each worker uses its own folder, and the same one after a restart."""
    settings = ManySettings(cache_dir=str(tmp_path))
    first, first_lock = take_home(settings)
    second, second_lock = take_home(settings)
    first_lock.close()
    again, again_lock = take_home(settings)

    assert first != second
    assert first == again
    second_lock.close()
    again_lock.close()


@pytest.mark.parametrize("name", ["", "..", "a/../b", "/a//b", "//a", ".hidden", "a/.b", "a\\b", "a\0b", "x" * 300])
def test_names_that_lead_elsewhere_are_unknown(name: str) -> None:
    """A name is a path below the source."""
    with pytest.raises(ModelUnknown):
        check_name(name)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("prod/.cache/a.tar.gz", "'.cache'"),
        ("a//b", "''"),
        ("prod/a\n\u2028\ud800b/c", r"'a\n\u2028\ud800b'"),
        ("prod/" + "x" * 300, f"'{'x' * 64}...'"),
        ("a/" * 999 + "b", f"'{'a/' * 32}...'"),
    ],
    ids=["hidden", "empty", "unprintable", "long part", "long"],
)
def test_an_error_shows_what_a_name_must_not_have(name: str, shown: str) -> None:
    with pytest.raises(ModelUnknown) as caught:
        check_name(name)

    assert str(caught.value).endswith(f"without hidden parts, not {shown}")


def test_a_leading_slash_is_no_part_of_a_name() -> None:
    """A leading slash, as in some of SageMaker's examples, is ignored."""
    assert check_name("/a/b.tar.gz") == "a/b.tar.gz"


def test_models_given_by_url_lie_below_a_root(directory: Place, tmp_path: Path) -> None:
    """SageMaker passes a name and a folder, which must be below a root, so that the host's files stay private."""
    root = tmp_path / "opt"
    (root / "hash" / "model").mkdir(parents=True)
    (root / "hash" / "model" / "config.json").write_text("{}")
    (root / "link").symlink_to("/etc")
    (root / "loop").symlink_to("loop")
    source = GivenSource(directory.find, [str(root)], 100)

    source.give("0a1b", f"file://{root}/hash/model")
    found = source.find("0a1b")
    source.forget("0a1b")

    assert found.folder == root / "hash" / "model"
    outside = ("/etc", f"{root}/../models", f"{root}/link", "s3://bucket/x", "http://host/x")
    for url in (
        *outside,
        f"{root}/missing",
        f"{root}/loop",
        f"{root}/loop/x",
        f"{root}/\0",
        f"{root}/\ud800",
        f"{root}/{'a' * 300}",
    ):
        with pytest.raises(ModelUnknown):
            source.give("0a1b", url)
    with pytest.raises(ModelUnknown):
        source.find("0a1b")


def test_a_folder_that_cannot_be_listed_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a model is not taken for the whole when a mounted folder fails; a folder that is gone is not missed."""
    (tmp_path / "m" / "1_Pooling").mkdir(parents=True)
    (tmp_path / "m" / "config.json").write_text("{}")
    list_folder, error = os.scandir, OSError(errno.EIO, "Input/output error")

    def fail(path: Any) -> Any:
        if str(path).endswith("1_Pooling"):
            raise error
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(SourceUnavailable, match="Input/output error"):
        find_in(tmp_path / "m", "m", 100)
    error = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert [file.path for file in find_in(tmp_path / "m", "m", 100).files] == ["config.json"]


def test_a_source_that_is_none_is_a_wrong_setting(tmp_path: Path) -> None:
    """An invalid source is a configuration error at the worker's start."""
    for source in ("nowhere", "http://host/x", "s3://"):
        with pytest.raises(SettingsError, match=r"handler\.many\.source"):
            open_source(ManySettings(source=source), tmp_path)


@pytest.mark.s3
def test_a_broken_connection_is_taken_up_where_it_broke(
    s3: Any, bucket: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a broken connection only the rest of the object is requested."""
    body = os.urandom(24 << 20)  # more than socket buffers hold
    bucket.put("m.tar.gz", body)
    with LossyProxy(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{proxy.port}")
        source = open_s3(bucket.settings)
        found = source.find("m.tar.gz")
        read = bytearray()
        with found.open(found.files[0], LoadProgress()) as content:
            read += content.read(1 << 20)
            proxy.is_losing.set()
            while piece := content.read(1 << 20):
                read += piece

    assert proxy.num_lost == 1
    assert bytes(read) == body


@pytest.mark.s3
def test_an_object_that_is_replaced_in_between_is_noticed(bucket: Place) -> None:
    """A model never consists of two versions."""
    bucket.put("m.tar.gz", model(b"old"))
    found = bucket.find("m.tar.gz")
    bucket.put("m.tar.gz", model(b"new"))

    with pytest.raises(Replaced):
        found.open(found.files[0], LoadProgress()).read()


@pytest.mark.s3
def test_a_store_that_does_not_answer_stops_only_what_is_not_on_disk(
    bucket: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked models are used; others get an error that suggests a retry."""
    bucket.put("m.tar.gz", model())
    bucket.downloader().fetch("m.tar.gz", LoadProgress()).release()
    with run_silent_server() as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
        settings = ManySettings(source=bucket.settings.source, connect_timeout_s=0.2, read_timeout_s=0.2)
        bucket.find = open_s3(settings).find
        downloader = bucket.downloader()

        lease = downloader.fetch("m.tar.gz", LoadProgress())
        with pytest.raises(SourceUnavailable):
            downloader.fetch("other.tar.gz", LoadProgress())

    assert (lease.folder / "config.json").exists()


def test_models_of_another_source_are_not_there(directory: Place) -> None:
    """A worker that gets the folder of one with another source neither lists nor serves what that one has unpacked.

    It may delete it to make room; otherwise a later worker of the first source finds it again.
    """
    directory.put("a.tar.gz", model())
    directory.downloader().fetch("a.tar.gz", LoadProgress()).release()

    def fail(name: str) -> SourceModel:
        raise SourceUnavailable("the models' store refused ListObjectsV2 (NoSuchBucket)")

    reachable, directory.find = directory.find, fail
    other = directory.downloader(source="s3://no-such-bucket/models")
    assert other.disk.models() == []
    assert other.disk.budget.used_bytes > 0
    with pytest.raises(SourceUnavailable):
        other.fetch("a.tar.gz", LoadProgress())

    directory.find = reachable
    lease = directory.downloader().fetch("a.tar.gz", LoadProgress())
    assert not lease.is_new


def test_of_a_replaced_model_the_version_in_use_is_listed(place: Place) -> None:
    """Only the version in use is listed, so that operators and the proxy see one row for each name."""
    downloader = place.downloader()
    for weights in (b"1" * 1000, b"2" * 1001):
        place.put("m.tar.gz", model(weights))
        lease = downloader.fetch("m.tar.gz", LoadProgress())

    assert [(name, version) for name, version, _ in downloader.disk.models()] == [("m.tar.gz", lease.version)]


@pytest.mark.parametrize("store", ["", "http://127.0.0.1:9000"])
def test_a_source_is_told_by_its_place(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Different spellings of a directory are one source; a bucket of the same name in another store is another."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9001")
    (tmp_path / "m").mkdir()

    def identify(source: str) -> str:
        return open_source(ManySettings(source=source), tmp_path).identity

    elsewhere = identify("s3://b/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store)

    names = [f"file://{tmp_path}/m", f"{tmp_path}/./m", "m"]
    assert {identify(name) for name in names} == {f"{tmp_path}/m"}
    assert identify("s3://b/x") != elsewhere
    assert identify("") == ""


@pytest.mark.parametrize(
    ("config", "store"),
    [
        ("[default]\nendpoint_url = http://one.example:9000\n", "http://one.example:9000"),
        (
            "[default]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = http://two.example\n",
            "http://two.example",
        ),
        ("[default]\nregion = eu-west-1\n", ""),
        ("[default]\nregion = us-east-1\nendpoint_url = https://s3.us-east-1.amazonaws.com\n", ""),
    ],
)
def test_a_source_has_the_store_of_awss_files(
    config: str, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint in AWS's configuration files is part of the source, so that equal bucket names share no cache."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    assert open_source(ManySettings(source="s3://b/x"), tmp_path).identity == f"s3://b/x {store}".rstrip()


@pytest.mark.s3
def test_a_bucket_that_is_not_there_is_no_unknown_model(bucket: Place) -> None:
    """A missing bucket is an error of its own, because the model may exist."""
    source = open_s3(ManySettings(source="s3://no-such-bucket/x"))

    with pytest.raises(SourceUnavailable):
        source.find("folder")


def test_two_threads_fill_different_models_within_one_budget(directory: Place) -> None:
    """Files in progress count, so that two threads together stay within the budget."""
    for number in range(8):
        directory.put(f"m{number}.tar.gz", model(os.urandom(20_000)))
    downloader = directory.downloader(disk_bytes=70_000)
    peaks: list[int] = []

    def fetch(number: int) -> None:
        for turn in range(10):
            downloader.fetch(f"m{(number + turn) % 8}.tar.gz", LoadProgress()).release()
            peaks.append(downloader.disk.budget.used_bytes)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fetch, (0, 4)))

    downloader.disk.check_integrity()
    assert len(peaks) == 20
    assert max(peaks) <= 70_000
