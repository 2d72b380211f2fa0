"""The forms of a model in /opt/ml/model, each of which becomes a model store."""

import gzip
import json
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from torchmoor.container.environment import ContainerEnvironment
from torchmoor.container.model import PROPERTIES_FOLDER, FoundModel, find_model
from torchmoor.errors import ConfigError
from torchmoor.fleet import packed_models
from torchmoor.wire.handler_variables import MODEL_PATH

Find = Callable[..., FoundModel]


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Return the stand-in for /opt/ml/model."""
    folder = tmp_path / "given"
    folder.mkdir()
    return folder


@pytest.fixture
def find(tmp_path: Path, given: Path) -> Find:
    """Return a function that looks for the model, with the archives chat, many and llava in the image."""
    archives = tmp_path / "archives"
    archives.mkdir()
    for name in ("chat", "many", "llava"):
        (archives / f"{name}.mar").touch()

    def look(environ: dict[str, str] | None = None, **told: object) -> FoundModel:
        environment = ContainerEnvironment(model_dir=given, archives=archives, **told)
        return find_model(environment, Path(tempfile.mkdtemp(dir=tmp_path)), environ or {})

    return look


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def make_archive(folder: Path, name: str = "my-model") -> Path:
    """Create an unpacked archive."""
    (folder / "MAR-INF").mkdir(parents=True)
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": {"modelName": name}}))
    (folder / "handler.py").touch()
    return folder


def pack(folder: Path, target: Path) -> None:
    if target.name.endswith(".mar"):
        with zipfile.ZipFile(target, "w") as bundle:
            for path in folder.rglob("*"):
                bundle.write(path, path.relative_to(folder))
    else:
        with tarfile.open(target, "w:gz") as tar:
            tar.add(folder, ".")


def test_a_checkpoint_is_served_where_it_lies(given: Path, find: Find) -> None:
    """A checkpoint is served from its folder by the image's chat archive, without a copy."""
    make_checkpoint(given)

    found = find()

    assert (found.name, found.archive, found.environment) == ("chat", "chat.mar", {MODEL_PATH: str(given)})
    assert (found.store / "chat.mar").is_symlink()


def test_a_checkpoint_that_the_environment_names_counts_more(given: Path, find: Find) -> None:
    """HF_MODEL_ID takes precedence over the folder; users of TGI and LMI often set it to /opt/ml/model."""
    make_checkpoint(given)

    assert find({"HF_MODEL_ID": "/opt/ml/model"}).environment == {}


def test_an_unpacked_archive_is_linked_under_its_own_name(given: Path, find: Find) -> None:
    """An unpacked archive is linked under the name in its manifest, whatever its folder is called."""
    make_archive(given)

    found = find()

    assert (found.name, found.archive, found.environment) == ("my-model", "my-model", {})
    assert (found.store / "my-model").resolve() == given


@pytest.mark.parametrize("file", ["other-name.mar", "model.tar.gz", "model.tgz"])
def test_a_packed_archive_is_unpacked_once_for_all_instances(
    tmp_path: Path, given: Path, find: Find, file: str
) -> None:
    """A packed archive is unpacked once for all instances, and keeps the name in its manifest."""
    pack(make_archive(tmp_path / "source"), given / file)

    found = find()

    assert found.archive == "my-model"
    assert (found.store / "my-model" / "handler.py").is_file()


@pytest.mark.parametrize("file", ["packaged.mar", "model.tar.gz"])
def test_a_packed_checkpoint_is_unpacked_and_served(tmp_path: Path, given: Path, find: Find, file: str) -> None:
    """A packed checkpoint, in either form of `torchmoor package`, is unpacked and served."""
    pack(make_checkpoint(tmp_path / "source"), given / file)

    found = find()

    assert found.name == "chat"
    assert (Path(found.environment[MODEL_PATH]) / "model.safetensors").read_bytes() == b"weights"


def test_an_archive_in_a_tarball_is_unpacked_twice(tmp_path: Path, given: Path, find: Find) -> None:
    """The AWS sample's model.tar.gz contains a .mar; on SageMaker the platform has unpacked the outer layer."""
    inner = tmp_path / "inner"
    inner.mkdir()
    pack(make_archive(tmp_path / "source"), inner / "llava.mar")
    pack(inner, given / "model.tar.gz")

    assert find().archive == "my-model"


def test_one_folder_with_a_model_will_do(given: Path, find: Find) -> None:
    """A tarball may contain one folder with the model; text files beside it do not matter."""
    make_checkpoint(given / "llava-1.5")
    (given / "README.md").touch()

    assert find().environment == {MODEL_PATH: str(given / "llava-1.5")}


def test_a_tarball_beside_what_was_unpacked_from_it_does_not_count(tmp_path: Path, given: Path, find: Find) -> None:
    """A tarball beside its unpacked files is ignored, since the SageMaker SDK's local mode mounts both."""
    pack(make_archive(tmp_path / "a", "a"), given / "a.mar")
    (given / "model.tar.gz").write_bytes(b"not looked into")

    assert find().archive == "a"


def test_several_models_need_a_name(tmp_path: Path, given: Path, find: Find) -> None:
    """Several models without a name are refused."""
    pack(make_archive(tmp_path / "a", "a"), given / "a.mar")
    pack(make_archive(tmp_path / "b", "b"), given / "b.mar")

    with pytest.raises(ConfigError, match=r"several models in .* \(a.mar, b.mar\).*TORCHMOOR_MODEL"):
        find()
    assert find(model="b").archive == "b"


def test_an_empty_folder_leaves_the_word_to_the_environment(given: Path, find: Find) -> None:
    """If the folder is empty or missing, the environment names the model."""
    assert find({"HF_MODEL_ID": "org/model"}).archive == "chat.mar"
    assert find(model="llava").archive == "llava.mar"
    given.rmdir()
    assert find({"OPTION_MODEL_ID": "org/model"}).archive == "chat.mar"


def test_lmis_properties_are_a_model(given: Path, find: Find) -> None:
    """LMI's properties count as a model; the chat handler reads option.model_id from them."""
    (given / "serving.properties").write_text("option.model_id=org/model\n")

    assert (find().archive, find().environment) == ("chat.mar", {})


@pytest.mark.parametrize("form", ["folder", "tarball"])
def test_lmis_properties_may_be_in_a_folder(tmp_path: Path, given: Path, find: Find, form: str) -> None:
    """LMI's published examples pack a folder with the file, not the file; a variable tells the handler where it is."""
    folder = (given if form == "folder" else tmp_path / "source") / "chat_llama2"
    folder.mkdir(parents=True)
    (folder / "serving.properties").write_text("option.model_id=s3://models/llama\n")
    if form == "tarball":
        pack(folder.parent, given / "code.tar.gz")

    found = find()

    assert found.archive == "chat.mar"
    assert (Path(found.environment[PROPERTIES_FOLDER]) / "serving.properties").is_file()


def test_lmis_properties_beside_a_checkpoint_configure_it(given: Path, find: Find) -> None:
    make_checkpoint(given / "weights")
    (given / "serving.properties").write_text("option.max_rolling_batch_size=4\n")

    assert find().environment == {MODEL_PATH: str(given / "weights")}  # the handler reads /opt/ml/model itself


def test_several_properties_and_scripts_are_refused(given: Path, find: Find) -> None:
    """Several properties files are refused, and so is a script, which would answer unlike the chat handler."""
    for name in ("a", "b"):
        (given / name).mkdir()
        (given / name / "serving.properties").touch()
    with pytest.raises(ConfigError, match=r"several models in .* \(a, b\)"):
        find()
    shutil.rmtree(given / "b")
    (given / "a" / "model.py").touch()
    with pytest.raises(ConfigError, match=r"script model\.py of AWS's LMI containers"):
        find()


def test_a_tarball_may_have_an_archive_of_its_own_name(tmp_path: Path, given: Path, find: Find) -> None:
    """A tarball may have its archive's name; deeper nesting is refused."""
    layers = [tmp_path / str(number) for number in range(3)]
    for layer in layers:
        layer.mkdir()
    pack(make_archive(tmp_path / "source"), layers[0] / "llava.mar")
    pack(layers[0], given / "llava.tar.gz")
    assert find().archive == "my-model"

    pack(layers[0], layers[1] / "llava.tar.gz")
    pack(layers[1], given / "llava.tar.gz")
    with pytest.raises(ConfigError, match="archives of its own name"):
        find()


def test_many_models_need_none_here(given: Path, find: Find) -> None:
    """Many models do not need one here, because the platform loads them later by POST /models."""
    assert find(is_multi_model=True).archive == "many.mar"


def test_no_model_says_what_could_be_one(given: Path, find: Find) -> None:
    """The error lists what could be a model, since a user sees only this message of a failed deployment."""
    with pytest.raises(ConfigError, match=r"there is no model in .*\.mar.*config\.json.*HF_MODEL_ID.*TORCHMOOR_MODEL"):
        find()
    (given / "weights.onnx").touch()
    with pytest.raises(ConfigError, match=r"has no model that can be served, but weights\.onnx: "):
        find()


def test_an_archive_that_the_image_lacks_is_named_with_those_it_has(given: Path, find: Find) -> None:
    """The error for a missing archive lists those of the image, which has the demo models only if built with them."""
    with pytest.raises(ConfigError, match="this image has no archive 'llm', but chat, llava, many"):
        find(model="llm")


def test_an_inference_script_is_not_taken_for_a_model(given: Path, find: Find) -> None:
    """The error explains to users of AWS's PyTorch containers that this one does not run a script."""
    (given / "code").mkdir()
    (given / "code" / "inference.py").touch()
    (given / "model.pth").touch()

    with pytest.raises(ConfigError, match=r"inference\.py of AWS's PyTorch containers"):
        find()


@pytest.mark.parametrize("file", ["model.mar", "model.tar.gz"])
def test_a_broken_archive_says_which_it_is(given: Path, find: Find, file: str) -> None:
    """The error names an archive that is truncated, or not an archive at all."""
    (given / file).write_bytes(b"\x1f\x8b no archive")

    with pytest.raises(ConfigError, match=rf"{file} cannot be unpacked: "):
        find()


@pytest.mark.parametrize("harm", ["encrypted", "another compression", "damaged"])
def test_an_archive_that_cannot_be_read_says_which_it_is(tmp_path: Path, given: Path, find: Find, harm: str) -> None:
    """The error for an unreadable archive names it on the last line, the only one that users see."""
    with zipfile.ZipFile(given / "model.mar", "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("config.json", "{}" * 500)
    content = bytearray((given / "model.mar").read_bytes())
    local, central = 0, content.index(b"PK\x01\x02")
    if harm == "encrypted":
        content[local + 6] |= 1
        content[central + 8] |= 1
    elif harm == "another compression":
        content[local + 8] = content[central + 10] = 97
    else:
        start = local + 30 + len("config.json")
        content[start : start + 4] = b"\xff" * 4
    (given / "model.mar").write_bytes(content)

    with pytest.raises(ConfigError, match=r"model\.mar cannot be unpacked: "):
        find()


def test_a_small_tarball_of_something_huge_is_refused_before_it_is_written(
    tmp_path: Path, given: Path, find: Find
) -> None:
    """A tarball that would expand to more than the disk is refused before it is unpacked."""
    member = tarfile.TarInfo("config.json")
    member.size = 1 << 60
    (given / "model.tar.gz").write_bytes(gzip.compress(member.tobuf()))

    with pytest.raises(ConfigError, match=rf"model\.tar\.gz needs {1 << 40} MiB to be unpacked"):
        find()


@pytest.mark.parametrize("name", ["lost+found", ".cache", "..data"])
def test_what_volumes_and_tools_leave_beside_a_model_does_not_matter(given: Path, find: Find, name: str) -> None:
    """lost+found and hidden folders beside a model are ignored."""
    make_checkpoint(given / name)

    assert find({"HF_MODEL_ID": "org/model"}).archive == "chat.mar"
    make_checkpoint(given / "llava-1.5")
    assert find().environment == {MODEL_PATH: str(given / "llava-1.5")}


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "link"])
def test_a_tarball_cannot_write_elsewhere(tmp_path: Path, given: Path, find: Find, name: str) -> None:
    """A path or link in a tarball that leads out of the folder is refused."""
    (tmp_path / "link").symlink_to("/etc/passwd")
    with tarfile.open(given / "model.tar.gz", "w:gz") as tar:
        member = tar.gettarinfo(tmp_path / "link") if name == "link" else tarfile.TarInfo(name)
        member.name = name
        tar.addfile(member)

    with pytest.raises(ConfigError, match=rf"tar\.gz cannot be unpacked: {name} is not a regular file or folder"):
        find()


def test_too_little_room_is_told_before_anything_is_written(
    tmp_path: Path, given: Path, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lack of space is an error before anything is written."""
    pack(make_archive(tmp_path / "source"), given / "model.mar")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(packed_models.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))

    with pytest.raises(ConfigError, match=r"model\.mar needs .* MiB to be unpacked, and .* has 1 MiB.*TMPDIR"):
        find()


def test_a_manifest_without_a_name_is_refused(given: Path, find: Find) -> None:
    """A manifest must have a name, which becomes a path and a URL."""
    make_archive(given, "../x")
    with pytest.raises(ConfigError, match=r"the model's name '\.\./x'"):
        find()
    (given / "MAR-INF" / "MANIFEST.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a manifest as torch-model-archiver writes it"):
        find()
