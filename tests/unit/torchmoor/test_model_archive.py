"""`torchmoor package`: the content of an archive, refusals, and reproducible output."""

import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from handlers.many.folder import find_model_folder
from torchmoor.cli import model_files
from torchmoor.cli.main import main
from torchmoor.cli.model_archive import package
from torchmoor.errors import TorchmoorError


def safetensors(num_bytes: int = 8) -> bytes:
    """Return a file in the safetensors format with one tensor."""
    entry = {"w": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}}
    header = json.dumps(entry).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "minilm"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "config.json").write_text('{"architectures": ["BertModel"]}')
    (folder / "model.safetensors").write_bytes(safetensors())
    (folder / "tokenizer.json").write_text("{}")
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "tf_model.h5").write_bytes(b"h5")
    (folder / "README.md").write_text("# hello")
    (folder / ".git" / "HEAD").write_text("ref")
    return folder


def test_only_what_serving_needs_goes_in(checkpoint: Path, tmp_path: Path) -> None:
    """Pickles, weights for other programs and hidden files are left out.

    Subfolders of sentence-transformers are included.
    """
    made = package(checkpoint, tmp_path / "m.tar.gz")

    with tarfile.open(made.path) as tar:
        names = tar.getnames()
    assert names == ["1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json"]
    assert list(made.left_out) == [".git/", "README.md", "pytorch_model.bin", "tf_model.h5"]


def test_links_that_lead_outside_are_left_out(checkpoint: Path, tmp_path: Path) -> None:
    """Links out of the directory are left out, because they could put any file of this machine into the archive."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key.json").write_text("secret")
    (checkpoint / "key.json").symlink_to(tmp_path / "private" / "key.json")
    (checkpoint / "folder").symlink_to(tmp_path / "private")
    (checkpoint / "vocab.json").symlink_to("tokenizer.json")
    (checkpoint / "again").symlink_to("1_Pooling")

    made = package(checkpoint, tmp_path / "m.tar.gz")

    assert {"again/config.json", "vocab.json"} < set(made.files)
    remark = " (a link that leads outside the directory)"
    assert {name for name in made.left_out if "link" in name} == {f"key.json{remark}", f"folder/{remark}"}
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.json").symlink_to(tmp_path / "private" / "key.json")
    with pytest.raises(TorchmoorError, match=r"copy the files there \(tokenizer\.json, vocab\.json\)"):
        package(checkpoint, tmp_path / "m.tar.gz")


def test_a_snapshot_of_a_hub_cache_is_packaged(checkpoint: Path, tmp_path: Path) -> None:
    """Links to the hub cache's blobs are followed, in a snapshot and in an old client's download folder."""
    cache = tmp_path / "hub" / "models--a--minilm"
    snapshot, local = cache / "snapshots" / "0f3c", tmp_path / "local"
    (cache / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(each for each in checkpoint.rglob("*") if each.is_file())):
        blob = cache / "blobs" / f"{number:064}"
        blob.write_bytes(path.read_bytes())
        for folder in (snapshot, local):
            link = folder / path.relative_to(checkpoint)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))

    packed = [package(folder, tmp_path / "m.tar.gz").path.read_bytes() for folder in (checkpoint, snapshot, local)]

    assert packed[0] == packed[1] == packed[2]


def test_weights_are_stored_as_they_are_and_the_rest_is_compressed(checkpoint: Path, tmp_path: Path) -> None:
    """Weights are not compressed, which would save little and slow each cold start.

    The system's tar reads the result.
    """
    (checkpoint / "model.safetensors").write_bytes(safetensors(400_000))
    (checkpoint / "vocab.txt").write_text("word\n" * 40_000)

    made = package(checkpoint, tmp_path / "m.tar.gz")
    subprocess.run(["tar", "-xzf", made.path, "-C", tmp_path], check=True)

    assert 400_000 < made.num_bytes < 420_000
    assert all((tmp_path / name).read_bytes() == (checkpoint / name).read_bytes() for name in made.files)


@pytest.mark.parametrize("name", ["m.tar.gz", "m.mar"])
def test_the_same_files_give_the_same_bytes(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """Time, order of writing and permissions of the files do not change the archive."""
    first = package(checkpoint, tmp_path / name).path.read_bytes()
    for path in checkpoint.rglob("*"):
        os.utime(path, (1, 1))
    (checkpoint / "config.json").chmod(0o600)

    second = package(checkpoint, tmp_path / name).path.read_bytes()

    assert first == second


@pytest.mark.parametrize("name", ["minilm.tar.gz", "minilm.tgz", "minilm.mar"])
def test_an_archive_in_the_directory_is_no_part_of_the_next_one(checkpoint: Path, name: str) -> None:
    """An earlier archive in the directory, the default output location, is left out."""
    first = package(checkpoint, checkpoint / name).path.read_bytes()

    second = package(checkpoint, checkpoint / name).path.read_bytes()

    assert first == second


def test_a_mar_is_a_zip_of_the_same_files(checkpoint: Path, tmp_path: Path) -> None:
    made = package(checkpoint, tmp_path / "m.mar")

    with zipfile.ZipFile(made.path) as bundle:
        assert bundle.testzip() is None
        assert sorted(bundle.namelist()) == list(made.files)


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    """One error lists everything that is missing, and no file is written."""
    folder = tmp_path / "empty"
    folder.mkdir()

    with pytest.raises(TorchmoorError) as caught:
        package(folder, tmp_path / "m.tar.gz")

    assert all(word in str(caught.value) for word in ("config.json", "safetensors", "tokenizer"))
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_pickled_weights_are_only_taken_when_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    """Pickled weights, which can run code, are refused with the name of the option that permits them."""
    (checkpoint / "model.safetensors").unlink()

    with pytest.raises(TorchmoorError, match="--allow-pickle"):
        package(checkpoint, tmp_path / "m.tar.gz")

    assert "pytorch_model.bin" in package(checkpoint, tmp_path / "m.tar.gz", allow_pickle=True).files


def test_a_cut_off_weights_file_is_noticed(checkpoint: Path, tmp_path: Path) -> None:
    """A Git LFS pointer or half a download would only fail on the worker."""
    (checkpoint / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")

    with pytest.raises(TorchmoorError, match="cut off"):
        package(checkpoint, tmp_path / "m.tar.gz")


def test_a_header_that_safetensors_refuses_is_noticed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that is too long is not read, and one that is nested too deeply is not one."""
    weights = checkpoint / "model.safetensors"
    nested = b"[" * 100_000 + b"]" * 100_000
    weights.write_bytes(len(nested).to_bytes(8, "little") + nested)
    with pytest.raises(TorchmoorError, match="cut off or not a safetensors file"):
        package(checkpoint, tmp_path / "m.tar.gz")

    monkeypatch.setattr(model_files, "MAX_HEADER_BYTES", 20)
    weights.write_bytes(safetensors())
    with pytest.raises(TorchmoorError, match="cut off or not a safetensors file"):
        package(checkpoint, tmp_path / "m.tar.gz")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_may_not_be_read_is_named(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """The error names the unreadable file, not the archive."""
    (checkpoint / name).chmod(0)
    if os.access(checkpoint / name, os.R_OK):
        pytest.skip("root may read everything")

    with pytest.raises(TorchmoorError, match=f"cannot be packaged: this user may not read {name}"):
        package(checkpoint, tmp_path / "m.tar.gz")


def test_a_missing_shard_is_named(checkpoint: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(TorchmoorError, match="model-00001-of-00002"):
        package(checkpoint, tmp_path / "m.tar.gz")


def test_an_output_that_cannot_be_written_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """The output's ending selects the format; a failed write is reported and leaves no file."""
    with pytest.raises(TorchmoorError, match=r"\.tar\.gz or \.mar"):
        package(checkpoint, tmp_path / "m.rar")
    with pytest.raises(TorchmoorError, match="cannot be written"):
        package(checkpoint, tmp_path / "nowhere" / "m.tar.gz")


def test_the_command_says_what_it_made(checkpoint: Path, tmp_path: Path) -> None:
    """Standard output has one line with the result; files left out, and errors, are on standard error."""
    target = tmp_path / "models" / "m.tar.gz"
    target.parent.mkdir()

    made = CliRunner().invoke(main, ["package", str(checkpoint), "-o", str(target)])
    failed = CliRunner().invoke(main, ["package", str(tmp_path / "models"), "-o", str(target)])

    assert made.exit_code == 0
    assert f"{target}  4 files" in made.stdout
    assert "left out pytorch_model.bin" in made.stderr
    assert failed.exit_code == 1
    assert "cannot be packaged" in failed.stderr


def chat_model(checkpoint: Path, architecture: str, **config: object) -> Path:
    (checkpoint / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    return checkpoint


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("LlamaForCausalLM", {}),
        ("GPT2LMHeadModel", {}),
        ("LlavaForConditionalGeneration", {"vision_config": {"hidden_size": 8}}),
    ],
)
def test_a_mar_of_a_model_that_chats_has_the_chat_handler(
    architecture: str, config: dict[str, object], checkpoint: Path, tmp_path: Path
) -> None:
    """A .mar of a chat model has the chat handler and serves under its file name; many models can read it, too."""
    chat_model(checkpoint, architecture, **config)

    made = package(checkpoint, tmp_path / "my-llava.mar")
    with zipfile.ZipFile(made.path) as bundle:
        names = set(bundle.namelist())
        manifest = json.loads(bundle.read("MAR-INF/MANIFEST.json"))
        bundle.extractall(tmp_path / "unpacked")

    assert made.endpoint == "my-llava"
    assert manifest["model"]["modelName"] == "my-llava"
    assert {
        "chat_entry.py",
        "chat.yaml",
        "handlers/torchserve/start_chat.py",
        "model/config.json",
        "model/model.safetensors",
    } <= names
    assert find_model_folder(tmp_path / "unpacked") == tmp_path / "unpacked" / "model"
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".partial"] == []


def test_a_package_may_have_the_longest_name(checkpoint: Path, tmp_path: Path) -> None:
    """The name of the incomplete file does not grow with the package's, which may have 255 bytes."""
    made = package(checkpoint, tmp_path / f"{'m' * 248}.tar.gz")

    assert len(made.path.name) == 255
    assert made.path.is_file()


@pytest.mark.parametrize("name", ["m.tar.gz", "m.mar"])
def test_a_model_that_does_not_chat_has_no_handler(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """A model that does not chat, such as a sentence encoder with a language model's architecture, gets no handler."""
    chat_model(checkpoint, "Qwen3ForCausalLM" if name == "m.mar" else "BertModel")
    (checkpoint / "modules.json").write_text("[]")

    made = package(checkpoint, tmp_path / name)

    assert made.endpoint == ""


def test_a_mar_whose_name_no_endpoint_can_have_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """A .mar whose name cannot be an endpoint's is refused with a suggestion, since `up` could not serve it."""
    chat_model(checkpoint, "LlamaForCausalLM")

    with pytest.raises(TorchmoorError, match=r"-o Llama-3-2\.mar"):
        package(checkpoint, tmp_path / "Llama-3.2.mar")

    assert not (tmp_path / "Llama-3.2.mar").exists()


def test_the_command_says_how_to_serve_it(checkpoint: Path, tmp_path: Path) -> None:
    """The command prints the whole `torchmoor up` command on standard error."""
    chat_model(checkpoint, "LlamaForCausalLM")

    made = CliRunner().invoke(main, ["package", str(checkpoint), "-o", str(tmp_path / "mine.mar")])

    assert made.exit_code == 0
    assert f"torchmoor up --model-store {tmp_path} --endpoint mine" in made.stderr
