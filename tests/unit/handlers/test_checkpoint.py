"""Sources of checkpoints: directories, S3 (a real server), and the hub's cache."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from botocore.exceptions import BotoCoreError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

import handlers.s3
from handlers.errors import SettingsError
from handlers.models import memory
from handlers.models.checkpoint import find_checkpoint
from handlers.models.loader import load_model
from handlers.models.memory import check_fits, free_bytes, weight_bytes
from handlers.models.skeleton import making_lock
from handlers.settings.model import ModelSettings
from handlers.worker.process_memory import group_limits
from tests.servers import S3Server, run_s3
from tests.unit.handlers.tiny_checkpoints import PLAIN, save

CPU = torch.device("cpu")
BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Run a real server with an empty bucket."""
    with run_s3(tmp_path_factory.mktemp("s3")) as server:
        client = server.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield server


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a client of an empty bucket, and set this process's environment for S3."""
    s3.use_in(monkeypatch)
    client = s3.client()
    yield client
    for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=item["Key"])
    client.close()


def upload(client: Any, folder: Path, prefix: str) -> None:
    for path in folder.iterdir():
        if path.is_file():
            client.upload_file(str(path), BUCKET, f"{prefix}/{path.name}")


def settings(tmp_path: Path, path: str, **options: Any) -> ModelSettings:
    return ModelSettings(path=path, cache_dir=str(tmp_path / "cache"), **options)


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    """A directory may be relative to the archive, or absolute."""
    assert find_checkpoint(ModelSettings(path="model"), tmp_path, {}) == tmp_path / "model"
    assert find_checkpoint(ModelSettings(path="/weights"), tmp_path, {}) == Path("/weights")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("https://example.com/model", r"s3://.*hf://"),
        *((path, "bucket/prefix") for path in ("s3://", "s3://bucket", "s3:///prefix")),
        *(
            (f"hf://{name}", "not a directory here")
            for name in ("models/of/mine", "a b", "", "../up", "some/one@", "some/one@../v1", "some/one@a b")
        ),
    ],
)
def test_an_address_of_another_form_is_refused(path: str, said: str, tmp_path: Path) -> None:
    """The error lists the supported forms. A path that does not exist is not looked up on the hub."""
    with pytest.raises(SettingsError, match=said):
        find_checkpoint(settings(tmp_path, path), tmp_path, {})


def test_a_checkpoint_in_s3_serves(bucket: Any, tmp_path: Path, checkpoint: Path, one_thread: None) -> None:
    """Only a model's own files are downloaded, and the model answers as the original does."""
    upload(bucket, checkpoint, "models/tiny")
    bucket.put_object(Bucket=BUCKET, Key="models/tiny/pytorch_model.bin", Body=b"a pickle")
    bucket.put_object(Bucket=BUCKET, Key="models/tiny/original/other.safetensors", Body=b"x")
    bucket.put_object(Bucket=BUCKET, Key="models/tiny-but-another/config.json", Body=b"{}")

    found = find_checkpoint(settings(tmp_path, f"s3://{BUCKET}/models/tiny/"), tmp_path, {})

    names = {path.name for path in found.iterdir()}
    assert names == {path.name for path in checkpoint.iterdir() if path.is_file()} - {"README.md"}
    model, original = load_model(found, CPU, "float32"), load_model(checkpoint, CPU, "float32")
    ids = torch.arange(9)
    assert torch.equal(model.embed(ids), original.embed(ids))


def test_downloads_are_compared_with_their_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were damaged on the way are not served."""
    configs: list[Any] = []

    def client(session: Any, service: str, *, config: Any) -> Any:
        configs.append(config)
        raise BotoCoreError

    monkeypatch.setattr("boto3.session.Session.client", client)

    with pytest.raises(SettingsError):
        find_checkpoint(settings(tmp_path, f"s3://{BUCKET}/models"), tmp_path, {})
    assert configs[0].response_checksum_validation in (None, "when_supported")


def test_it_is_downloaded_once(bucket: Any, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted worker, or another of the host, reuses the download; concurrent ones wait for it."""
    upload(bucket, checkpoint, "once")
    fetched: list[str] = []
    make = boto3.session.Session.client

    def client(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        made.meta.events.register("before-call.s3.GetObject", lambda params, **_: fetched.append(params["url_path"]))
        return made

    monkeypatch.setattr("boto3.session.Session.client", client)
    found: list[Path] = []

    def find() -> None:
        found.append(find_checkpoint(settings(tmp_path, f"s3://{BUCKET}/once"), tmp_path, {}))

    threads = [threading.Thread(target=find) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    find()

    assert len(fetched) == len(set(fetched)) == len(list(found[0].iterdir()))
    assert found == [found[0]] * 4


def test_new_content_is_downloaded_again(bucket: Any, tmp_path: Path) -> None:
    """New content under the same address replaces the old folder and remains of killed downloads."""
    bucket.put_object(Bucket=BUCKET, Key="changing/config.json", Body=b"{}")
    where = settings(tmp_path, f"s3://{BUCKET}/changing")
    old = find_checkpoint(where, tmp_path, {})
    (old.parent / ".partial-killed").mkdir()
    bucket.put_object(Bucket=BUCKET, Key="changing/config.json", Body=b'{"new": true}')

    new = find_checkpoint(where, tmp_path, {})

    assert json.loads((new / "config.json").read_text()) == {"new": True}
    assert [path for path in new.parent.iterdir() if path.is_dir()] == [new]


def test_a_killed_download_takes_no_room_from_the_next(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remains are deleted before the free space is checked; 64 MiB of it must stay free."""
    bucket.put_object(Bucket=BUCKET, Key="killed/config.json", Body=b"{}")
    where = settings(tmp_path, f"s3://{BUCKET}/killed")
    has_room = False
    usage = shutil.disk_usage(tmp_path)

    def measure(path: Path) -> Any:
        is_clean = not list(Path(path).glob(".partial-*"))
        return usage._replace(free=(64 << 20) + 2 if is_clean and has_room else (64 << 20) + 1)

    monkeypatch.setattr(shutil, "disk_usage", measure)
    with pytest.raises(SettingsError, match="the disk has only"):
        find_checkpoint(where, tmp_path, {})
    (home,) = (tmp_path / "cache").iterdir()
    (home / ".partial-killed").mkdir()
    (home / ".partial-killed" / "model.safetensors").write_bytes(b"half")

    has_room = True

    assert (find_checkpoint(where, tmp_path, {}) / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("replacement", [b"another length", b"87654321"])
def test_weights_that_change_during_their_download_leave_nothing(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replacement: bytes
) -> None:
    """A folder of the cache is complete and of one version, or absent; the next start downloads again."""
    bucket.put_object(Bucket=BUCKET, Key="changed/config.json", Body=b"{}")
    bucket.put_object(Bucket=BUCKET, Key="changed/model.safetensors", Body=b"12345678")
    where = settings(tmp_path, f"s3://{BUCKET}/changed")
    listed = handlers.s3.list_objects

    def stale(client: Any, *place: Any, **limits: Any) -> Any:
        found = list(listed(client, *place, **limits))
        client.put_object(Bucket=BUCKET, Key="changed/model.safetensors", Body=replacement)
        return found

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(handlers.s3, "list_objects", stale)
        with pytest.raises(SettingsError, match="has changed"):
            find_checkpoint(where, tmp_path, {})

    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_dir() and path.parent.name != "cache"] == []
    assert (find_checkpoint(where, tmp_path, {}) / "model.safetensors").read_bytes() == replacement


def test_a_complete_folder_survives_a_crash_of_the_host(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files are on the disk before their folder gets the name by which later starts use it, and then the name."""
    bucket.put_object(Bucket=BUCKET, Key="synced/config.json", Body=b"{}")
    bucket.put_object(Bucket=BUCKET, Key="synced/model.safetensors", Body=b"weights")
    synced: list[int] = []
    before: list[int] = []
    rename = Path.rename

    def sync(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)

    def rename_noted(path: Path, target: Path) -> Path:
        before.extend(synced)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename_noted)

    found = find_checkpoint(settings(tmp_path, f"s3://{BUCKET}/synced"), tmp_path, {})

    assert {path.stat().st_ino for path in (found, *found.iterdir())} <= set(before)
    assert found.parent.stat().st_ino in synced[len(before) :]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (f"s3://{BUCKET}/nothing", r"no config\.json in s3://checkpoints/nothing"),
        ("s3://no-such-bucket/x", "s3://no-such-bucket/x cannot be read"),
    ],
)
def test_an_address_without_a_checkpoint_is_refused(address: str, said: str, bucket: Any, tmp_path: Path) -> None:
    """The error contains the address as configured."""
    with pytest.raises(SettingsError, match=said):
        find_checkpoint(settings(tmp_path, address), tmp_path, {})


def test_a_checkpoint_that_is_too_large_is_not_downloaded(bucket: Any, tmp_path: Path) -> None:
    """The error names the setting of the limit."""
    bucket.put_object(Bucket=BUCKET, Key="large/config.json", Body=b"{}" + b" " * 1000)

    with pytest.raises(SettingsError, match="max_download_bytes"):
        find_checkpoint(settings(tmp_path, f"s3://{BUCKET}/large", max_download_bytes=999), tmp_path, {})

    assert not (tmp_path / "cache").exists()


def test_a_download_from_s3_logs_its_progress(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The total is that of all files."""
    monkeypatch.setattr("handlers.models.checkpoint.WORKER_INTERVAL_S", 0.001)
    bucket.put_object(Bucket=BUCKET, Key="large/config.json", Body=b"{}")
    bucket.put_object(Bucket=BUCKET, Key="large/model.safetensors", Body=b"w" * 30_000_000)

    with caplog.at_level("INFO", "handlers"):
        find_checkpoint(settings(tmp_path, f"s3://{BUCKET}/large"), tmp_path, {})

    lines = [record.getMessage() for record in caplog.records if "progress: " in record.getMessage()]
    assert lines
    assert all(line.startswith("progress: downloading ") and line.endswith(" of 30.0 MB") for line in lines)


@pytest.fixture
def hub_cache(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the hub's cache with one checkpoint, and no network."""
    folder = tmp_path / "hub" / "models--someone--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(checkpoint, folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder / "snapshots" / commit


@pytest.mark.parametrize(
    "options", [{}, {"path": "hf://someone/tiny@main"}, {"path": "hf://someone/tiny@main", "revision": "main"}]
)
def test_a_name_on_the_hub_is_found_in_its_cache(options: Any, hub_cache: Path, tmp_path: Path) -> None:
    """HF_HUB_OFFLINE prevents every request."""
    assert find_checkpoint(ModelSettings(**{"path": "hf://someone/tiny", **options}), tmp_path, {}) == hub_cache


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "hf://someone/else"}, "HF_HUB_OFFLINE"),
        ({"path": "hf://someone/tiny", "revision": "v9"}, "HF_HUB_OFFLINE"),
        ({"path": "hf://someone/tiny@v9"}, "HF_HUB_OFFLINE"),
        (
            {"path": "hf://someone/tiny@main", "revision": "v9"},
            r"handler\.model\.revision \(v9\) are different revisions",
        ),
    ],
)
def test_what_is_not_in_the_cache_says_so(options: Any, said: str, hub_cache: Path, tmp_path: Path) -> None:
    """The error says that the hub was not asked, and why."""
    with pytest.raises(SettingsError, match=said):
        find_checkpoint(ModelSettings(**options), tmp_path, {})


def test_weights_are_counted_in_the_type_they_are_loaded_as(tmp_path: Path) -> None:
    """The size is computed from the headers of all shards; integer tensors keep their type."""
    save_file({"a": torch.zeros(3, 5, dtype=torch.float16)}, tmp_path / "model-1.safetensors")
    save_file(
        {"b": torch.zeros(7, dtype=torch.bfloat16), "c": torch.zeros(2, dtype=torch.int64)},
        tmp_path / "model-2.safetensors",
    )

    assert weight_bytes(tmp_path, None) == 2 * 22 + 16
    assert weight_bytes(tmp_path, torch.float32) == 4 * 22 + 16


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        '{"a": 1}',
        '{"a": {}}',
        '{"a": {"dtype": [], "shape": [1]}}',
        '{"a": {"dtype": "F32", "shape": ["x"]}}',
        '{"a": {"dtype": "F32", "shape": null}}',
        '{"a": {"dtype": "F32", "shape": [-1]}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_header_is_named(header: str, tmp_path: Path) -> None:
    """The error of a damaged weight file has its name."""
    content = header.encode()
    (tmp_path / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)

    with pytest.raises(SettingsError, match=r"model\.safetensors is not a safetensors file"):
        weight_bytes(tmp_path, None)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    """A clone without Git LFS has short texts in place of the weights; the error names the command that gets them."""
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 9\n")

    with pytest.raises(SettingsError, match=r"model\.safetensors .*: run git lfs pull"):
        weight_bytes(tmp_path, None)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_copies_of_the_weights_are_not_counted(is_sharded: bool, tmp_path: Path) -> None:
    """Transformers reads one of several forms, so a checkpoint with copies fits where one without them does."""
    name = "model-00001-of-00001.safetensors" if is_sharded else "model.safetensors"
    save_file({"a": torch.zeros(3, 5)}, tmp_path / name)
    if is_sharded:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    save_file({"a": torch.zeros(3, 5)}, tmp_path / "consolidated.safetensors")

    assert weight_bytes(tmp_path, None) == 60


def test_a_checkpoint_that_does_not_fit_is_refused(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is too large is refused with advice before its weights are read."""
    needed = weight_bytes(checkpoint, torch.float32)
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed - 1)

    with pytest.raises(SettingsError, match=r"GB free: choose a smaller handler\.model\.dtype"):
        load_model(checkpoint, CPU, "float32")

    check_fits(checkpoint, CPU, torch.float16)


def test_a_checkpoint_without_some_of_its_weights_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    """A checkpoint with missing weights is refused, because transformers would initialise them at random."""
    folder = tmp_path / "cut"
    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(each for each in weights if each.endswith("layers.0.self_attn.q_proj.weight"))
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    with pytest.raises(
        SettingsError, match=r"lack 1 of the model's weights \(.*layers\.0\.self_attn\.q_proj\.weight\)"
    ):
        load_model(folder, torch.device("cpu"), "auto")


def test_a_checkpoint_of_other_sizes_than_declared_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    """The error names weights that config.json describes otherwise."""
    folder = tmp_path / "other"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_bytes())
    config["text_config"]["intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(SettingsError, match=r"other shapes for \d+ of the model's weights \(.*mlp.*\)"):
        load_model(folder, torch.device("cpu"), "auto")


@pytest.mark.parametrize("family", ["llava", "gpt2"])
def test_a_checkpoint_without_tokenizer_says_so(family: str, tmp_path: Path, checkpoint: Path) -> None:
    """The error names the missing file. transformers makes up an empty tokenizer for some families, such as GPT-2."""
    whole, folder = checkpoint, tmp_path / "mute"
    if family != "llava":
        whole = tmp_path / "whole"
        save(PLAIN[family](), whole, checkpoint)
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("tokenizer*"))

    with pytest.raises(SettingsError, match=r"cannot be used: .*; there is no tokenizer\.json in it"):
        load_model(folder, torch.device("cpu"), "auto")


def test_one_thread_at_a_time_makes_a_model(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers changes settings of the whole process meanwhile, such as the type of floats."""
    make, held = AutoModelForImageTextToText.from_pretrained, list[bool]()

    def note(*args: Any, **options: Any) -> Any:
        held.append(making_lock.locked())
        return make(*args, **options)

    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", note)
    load_model(checkpoint, CPU, "auto")

    assert held == [True]
    assert not making_lock.locked()


@pytest.mark.parametrize(
    ("group", "limit", "kept"),
    [
        ("", "memory.max", "anon"),  # a container sees its own group as the root
        ("a.slice/b.service", "memory.max", "anon"),
        ("a.slice", "memory.max", "anon"),
        ("memory", "memory.limit_in_bytes", "total_rss"),
        ("memory/a.slice/b.service", "memory.limit_in_bytes", "total_rss"),
    ],
)
def test_the_free_memory_of_this_machine_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, limit: str, kept: str
) -> None:
    """The free memory is what the system reports, at most what a group of this process leaves to it."""
    available = free_bytes(CPU)
    membership, folder = tmp_path / "self", tmp_path / "cgroup" / group
    membership.write_text("0::/a.slice/b.service\n4:memory:/a.slice/b.service\n")
    folder.mkdir(parents=True)
    (folder / limit).write_text("1000000\n")
    (folder / "memory.stat").write_text(f"{kept} 300000\nfile 500000\n")
    monkeypatch.setattr(memory, "group_limits", lambda: group_limits(tmp_path / "cgroup", membership))

    assert available is not None
    assert available > 1000000
    assert free_bytes(CPU) == 700000
