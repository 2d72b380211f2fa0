"""Forms of model data, in S3 and in files, and what instances run for each."""

import gc
import json
import os
import shutil
import tarfile
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.http_servers import QuietHandler, serve_http
from tests.servers import BUCKET, LossyProxy, S3Server
from tests.waiting import DEADLINE_S
from torchmoor.async_inference.objects.object_store import ObjectError, ObjectUnavailable
from torchmoor.config.control import ControlSettings
from torchmoor.config.objects import ObjectSettings
from torchmoor.control.artifacts import Artifacts, ServedModel
from torchmoor.control.downloads import DownloadEnded, DownloadState, ModelStore, StoredFile
from torchmoor.control.images import default_variables, find_container
from torchmoor.errors import ConfigError, LaunchError, RequestInvalid
from torchmoor.wire.checkpoint_places import PROPERTIES_FOLDER
from torchmoor.wire.handler_variables import MODEL_PATH

REGISTRY = "763104351884.dkr.ecr.us-east-1.amazonaws.com"
LMI = f"{REGISTRY}/djl-inference:0.26.0-deepspeed0.12.6-cu121"
TORCHSERVE = f"{REGISTRY}/pytorch-inference:2.3.0-gpu-py311"
ONE_DEVICE = "TORCHMOOR_HANDLER_MODEL_TENSOR_PARALLEL"
Fetch = Callable[..., ServedModel]
Put = Callable[..., None]


@pytest.fixture
def store(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a prefix in S3, configured by the environment."""
    s3_server.use_in(monkeypatch)
    return f"s3://{BUCKET}/artifacts"


@pytest.fixture
def put(s3_server: S3Server, store: str) -> Put:
    """Return a function that writes objects below a prefix."""

    def write(prefix: str, **objects: bytes) -> None:
        client = s3_server.client()
        for name, content in objects.items():
            key = f"artifacts/{prefix}/{name.replace('__', '/').replace('_dot_', '.')}"
            client.put_object(Bucket=BUCKET, Key=key, Body=content)
        client.close()

    return write


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    """Return a function that fetches a container's model into a folder."""
    artifacts = Artifacts(
        ControlSettings(model_directories=(str(tmp_path),)), ObjectSettings(), tmp_path / "no-store", ()
    )

    def run(image: str = TORCHSERVE, **container: Any) -> ServedModel:
        return artifacts.fetch({"Image": image, **container}, "name", tmp_path / "work", DownloadState())

    return run


def uncompressed(url: str) -> dict[str, Any]:
    source = {"S3Uri": url, "S3DataType": "S3Prefix", "CompressionType": "None"}
    return {"ModelDataSource": {"S3DataSource": source}}


@pytest.mark.s3
def test_an_uncompressed_archive_is_served_under_its_own_name(fetch: Fetch, put: Put, store: str) -> None:
    """An archive of torch-model-archiver's --archive-format no-archive keeps its name and folders."""
    manifest = json.dumps({"model": {"modelName": "llava-sm", "handler": "handler.py"}}).encode()
    put("archive", **{"MAR-INF__MANIFEST_dot_json": manifest, "handler_dot_py": b"", "sub__more_dot_py": b"x"})

    served = fetch(**uncompressed(f"{store}/archive/"))

    assert (served.archive, served.contents) == ("llava-sm", None)
    assert served.store is not None
    assert (served.store / "llava-sm" / "sub" / "more.py").read_bytes() == b"x"


@pytest.mark.s3
def test_files_of_two_versions_are_not_mixed(
    fetch: Fetch, put: Put, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is replaced by another of the same size after the others were listed is not served with them."""
    manifest = json.dumps({"model": {"modelName": "m", "handler": "handler.py"}}).encode()
    put("mixed", **{"MAR-INF__MANIFEST_dot_json": manifest, "handler_dot_py": b"old"})
    download = ModelStore.download

    def download_later(*arguments: Any) -> None:
        put("mixed", handler_dot_py=b"new")
        download(*arguments)

    monkeypatch.setattr(ModelStore, "download", download_later)

    with pytest.raises(ObjectError, match="was replaced while it was downloaded"):
        fetch(**uncompressed(f"{store}/mixed/"))


@pytest.mark.s3
def test_a_checkpoint_below_a_prefix_is_left_to_the_handler(fetch: Fetch, put: Put, store: str) -> None:
    """Only LMI's properties are fetched from a checkpoint's prefix; the handler downloads the rest."""
    properties = b"option.max_rolling_batch_size=4\n"
    put("weights", config_dot_json=b"{}", model_dot_safetensors=b"x", serving_dot_properties=properties)

    served = fetch(LMI, **uncompressed(f"{store}/weights/"))

    assert served.environment[MODEL_PATH] == f"{store}/weights/"
    folder = Path(served.environment[PROPERTIES_FOLDER])
    assert [each.name for each in folder.iterdir()] == ["serving.properties"]
    assert (folder / "serving.properties").read_bytes() == properties


@pytest.mark.s3
def test_properties_in_a_packed_folder_name_the_checkpoint(
    fetch: Fetch, store: str, s3_server: S3Server, tmp_path: Path
) -> None:
    (tmp_path / "mymodel").mkdir()
    (tmp_path / "mymodel" / "serving.properties").write_text("option.model_id=s3://weights/llama\n")
    with tarfile.open(tmp_path / "mymodel.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "mymodel", "mymodel")
    client = s3_server.client()
    client.upload_file(str(tmp_path / "mymodel.tar.gz"), BUCKET, "artifacts/code/mymodel.tar.gz")
    client.close()

    served = fetch(LMI, ModelDataUrl=f"{store}/code/mymodel.tar.gz")

    assert served.contents is not None
    assert (Path(served.environment[PROPERTIES_FOLDER]) / "serving.properties").is_file()
    assert MODEL_PATH not in served.environment
    assert served.environment["OPTION_OUTPUT_FORMATTER"] == "json"


@pytest.mark.s3
def test_what_is_no_model_says_so(fetch: Fetch, put: Put, store: str) -> None:
    put("notes", README_dot_md=b"")

    with pytest.raises(ObjectError, match=r"there is no s3://.*/artifacts/gone\.tar\.gz"):
        fetch(LMI, ModelDataUrl=f"{store}/gone.tar.gz")
    with pytest.raises(ObjectError, match=r"there is no bucket no-such-bucket$"):
        fetch(LMI, ModelDataUrl="s3://no-such-bucket/x.tar.gz")
    with pytest.raises(ObjectError, match=r"there is no bucket no-such-bucket$"):
        fetch(**uncompressed("s3://no-such-bucket/x"))
    with pytest.raises(ObjectError, match=r"there is no object below .*/artifacts/empty/"):
        fetch(**uncompressed(f"{store}/empty"))
    with pytest.raises(ConfigError, match=r"has no model that can be served, but README\.md"):
        fetch(**uncompressed(f"{store}/notes/"))


@pytest.mark.s3
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_download_counts_its_bytes_and_can_be_ended(put: Put, store: str, tmp_path: Path) -> None:
    """A download reports its bytes and can be ended from any thread with the next bytes."""
    put("large", a_dot_bin=b"a" * 300_000, b_dot_bin=b"b" * 300_000)
    models, state = ModelStore(ControlSettings(), ObjectSettings()), DownloadState()
    files = models.list(f"{store}/large")
    assert state.describe() == ""

    models.download(files, tmp_path, state)

    assert state.describe() == "downloading the model, 0.6 of 0.6 MB until now"
    assert (tmp_path / "b.bin").stat().st_size == 300_000
    ending = threading.Thread(target=state.end)
    ending.start()
    ending.join()
    with pytest.raises(DownloadEnded):
        models.download(files, tmp_path, state)
    with pytest.raises(ConfigError, match=r"control\.max_model_bytes"):
        ModelStore(ControlSettings(max_model_bytes=1000), ObjectSettings()).download(files, tmp_path, DownloadState())
    gc.collect()  # s3transfer leaves the connection of an ended download to the collector


def test_a_model_that_would_fill_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of the refusal states how much space must stay free, besides the model's size."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=39 << 20))
    models = ModelStore(ControlSettings(), ObjectSettings())

    with pytest.raises(ConfigError, match=r"has 4 MiB, and .* has 39 MiB, of which 1024 must stay free"):
        models.download([StoredFile("s3://bucket/a", "a", 4 << 20)], tmp_path, DownloadState())


@pytest.mark.parametrize(
    ("image", "formatter"),
    [
        (LMI, "json"),
        (f"{REGISTRY}/djl-inference:0.25.0-deepspeed0.11.0-cu118", "json"),
        (f"{REGISTRY}/djl-inference:0.27.0-deepspeed0.12.6-cu121", "jsonlines"),
        (f"{REGISTRY}/djl-inference:0.36.0-lmi18.0.0-cu128", "jsonlines"),
        ("deepjavalibrary/djl-serving:lmi", "jsonlines"),
    ],
)
def test_an_lmi_image_has_the_form_of_its_version(image: str, formatter: str) -> None:
    variables = default_variables(image, find_container(image, ()))

    assert variables["OPTION_OUTPUT_FORMATTER"] == formatter
    assert variables[ONE_DEVICE] == "1"


def test_a_triton_image_runs_torchscript_unless_the_environment_forbids_it(fetch: Fetch) -> None:
    """A Triton image runs TorchScript, like other images' programs, unless the environment forbids it."""
    name, image = "TORCHMOOR_HANDLER_MANY_ALLOW_TORCHSCRIPT", f"{REGISTRY}/sagemaker-tritonserver:22.12-py3"
    models = {"Mode": "MultiModel", "ModelDataUrl": "s3://bucket/models/"}

    assert fetch(image, **models).environment[name] == "true"
    assert fetch(image, **models, Environment={name: "false"}).environment[name] == "false"


def test_the_environment_wins_over_an_images_defaults(fetch: Fetch) -> None:
    served = fetch(LMI, Environment={"HF_MODEL_ID": "owner/name", ONE_DEVICE: "2"})

    assert served.environment[ONE_DEVICE] == "2"


@pytest.mark.s3
def test_a_lost_answer_of_the_store_is_asked_for_again(
    put: Put, store: str, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("cut", a_dot_bin=b"a" * 300_000)
    with LossyProxy(s3_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{proxy.port}")
        models = ModelStore(ControlSettings(), ObjectSettings())
        files = models.list(f"{store}/cut")
        proxy.is_losing.set()

        models.download(files, tmp_path, DownloadState())

    assert proxy.num_lost == 1
    assert (tmp_path / "a.bin").read_bytes() == b"a" * 300_000


@pytest.mark.s3
def test_an_object_that_would_leave_the_folder_is_refused(tmp_path: Path, store: str) -> None:
    """An object whose key leads out of the folder is refused; S3 accepts such keys."""
    models = ModelStore(ControlSettings(), ObjectSettings())

    with pytest.raises(ObjectError, match=r"/\.\./"):
        models.download([StoredFile(f"{store}/a/../../b", "../../b", 1)], tmp_path, DownloadState())


def test_a_long_manifest_costs_no_memory(fetch: Fetch, tmp_path: Path) -> None:
    """A manifest of 64 MiB in an archive of 64 KiB is refused before the proxy reads it into memory."""
    with zipfile.ZipFile(tmp_path / "bomb.mar", "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("MAR-INF/MANIFEST.json", bytes(64 << 20))
    tracemalloc.start()

    with pytest.raises(ConfigError, match="has more than 1048576 bytes"):
        fetch(ModelDataUrl=f"file://{tmp_path}/bomb.mar")

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_damaged_manifest_names_its_archive(fetch: Fetch, tmp_path: Path) -> None:
    """The error for a damaged manifest names its archive, as for a damaged directory of the zip."""
    path = tmp_path / "damaged.mar"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": {"modelName": "m", "handler": "h.py"}}))
    damaged = bytearray(path.read_bytes())
    damaged[55:70] = b"\xff" * 15
    path.write_bytes(damaged)

    with pytest.raises(LaunchError, match=r"damaged\.mar cannot be read"):
        fetch(ModelDataUrl=f"file://{path}")


class _BreaksOff(QuietHandler):
    """A store that ends every object before its last byte."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.send_header("ETag", '"tag"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"x" * 60)

    do_HEAD = do_GET


def test_a_download_that_breaks_off_each_time_names_the_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint's FailureReason, and not only the log, names the object that breaks off each time."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    files = [StoredFile("s3://bucket/a.bin", "a.bin", 100)]
    with serve_http(_BreaksOff) as url:
        store = ModelStore(ControlSettings(), ObjectSettings(s3_endpoint_url=url, s3_region="us-east-1"))
        with pytest.raises(ObjectUnavailable, match=r"s3://bucket/a\.bin: the store cannot be reached"):
            store.download(files, tmp_path, DownloadState())


def test_an_ended_download_sends_no_further_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that has taken too long ends with its request, although a store that cannot answer is asked again."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    state, asked = DownloadState(), []

    class Unavailable(QuietHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            state.end()
            self.reply(503)

        do_HEAD = do_GET

    with serve_http(Unavailable) as url:
        store = ModelStore(ControlSettings(), ObjectSettings(s3_endpoint_url=url, s3_region="us-east-1"))
        with pytest.raises(DownloadEnded):
            store.download([StoredFile("s3://bucket/a.bin", "a.bin", 100)], tmp_path, state)

    assert len(asked) == 1


def test_an_ended_download_waits_for_no_further_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """urllib3 itself returns when a whole piece of 256 KiB has arrived, which a slow store sends in hours."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    state, is_ended, were_ended = DownloadState(), threading.Event(), SimpleQueue[bool]()

    class Slow(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "300000")
            self.send_header("ETag", '"tag"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(b"x" * 100)
                state.end()
                self.wfile.write(b"x")
                were_ended.put(is_ended.wait(DEADLINE_S))

        do_HEAD = do_GET

    with serve_http(Slow) as url:
        settings = ObjectSettings(s3_endpoint_url=url, s3_region="us-east-1", read_timeout_s=2 * DEADLINE_S)
        store = ModelStore(ControlSettings(), settings)
        with pytest.raises(DownloadEnded):
            store.download([StoredFile("s3://bucket/a.bin", "a.bin", 300_000)], tmp_path, state)
        is_ended.set()

    assert were_ended.get(timeout=DEADLINE_S)


@pytest.mark.parametrize("name", ["model.mar", "model.tar.gz", "config.json"])
def test_what_is_neither_file_nor_folder_is_not_opened(fetch: Fetch, tmp_path: Path, name: str) -> None:
    """A pipe or a device is not opened, because reading it might not end."""
    os.mkfifo(tmp_path / name)

    with pytest.raises(ConfigError, match="has no model that can be served"):
        fetch(ModelDataUrl=f"file://{tmp_path}/{name}")


def test_a_link_does_not_lead_out_of_the_allowed_directories(fetch: Fetch, tmp_path: Path) -> None:
    (tmp_path / "link.mar").symlink_to("/etc/passwd")
    (tmp_path / "folder").symlink_to("/etc")

    for place in ("link.mar", "folder/passwd", "folder/../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd"):
        with pytest.raises(RequestInvalid, match="may not be read"):
            fetch(ModelDataUrl=f"file://{tmp_path}/{place}")


def test_a_file_is_not_a_place_of_many_models(fetch: Fetch, tmp_path: Path) -> None:
    """CreateModel refuses it, rather than an instance that has started."""
    (tmp_path / "one.mar").touch()

    with pytest.raises(RequestInvalid, match=r"one\.mar is not a directory"):
        fetch(ModelDataUrl=f"file://{tmp_path}/one.mar", Mode="MultiModel")


@pytest.mark.parametrize("place", ["/a%00b", f"/{'a' * 256}", "[x/model.mar"])
def test_a_name_that_no_file_can_have_is_refused(fetch: Fetch, tmp_path: Path, place: str) -> None:
    """The error blames the request, not the control plane."""
    with pytest.raises(RequestInvalid, match="names no file"):
        fetch(ModelDataUrl=f"file://{tmp_path}{place}" if place.startswith("/") else f"file://{place}")
