"""Errors of `torchmoor up`, which must say what to do."""

import errno
import socket
import tempfile
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from torchmoor.cli.main import main
from torchmoor.config.scaling import ScalingSettings, StepScaling, TargetTracking
from torchmoor.config.up import UpSettings
from torchmoor.run.checkpoints import Checkpoint, check_environment, find_checkpoints


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def settings_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> UpSettings:
    """Return the settings of a command line."""
    given: list[UpSettings] = []

    async def take(options: UpSettings, *_: object, **__: object) -> None:
        given.append(options)

    monkeypatch.setattr("torchmoor.cli.commands.up.run", take)
    result = invoke("up", *arguments)
    assert result.exit_code == 0, result.output
    return given[0]


@pytest.mark.parametrize(("option", "names"), [("--host", "--host or --port"), ("--admin-host", "--admin-host or")])
def test_an_address_of_another_machine_is_an_error(option: str, names: str) -> None:
    """The error has the address, the reason and the options of its plane. The address is reserved for documentation."""
    secret = {"TORCHMOOR_ADMIN_TOKEN": "x" * 16}
    arguments = ("up", option, "192.0.2.1", "--no-auth", "--port", "0", "--admin-port", "0")
    result = CliRunner().invoke(main, arguments, env=secret)

    assert result.exit_code == 1
    said = f"cannot listen on http://192.0.2.1:0: Cannot assign requested address; give another {names}"
    assert said in result.stderr
    assert "starting" not in result.stderr


def test_a_wrong_variable_of_the_handlers_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    arguments = ("up", "--run-dir", str(tmp_path / "run"), "--model-store", str(tmp_path), "--port", "0")
    result = CliRunner().invoke(main, arguments, env={"TORCHMOOR_HANDLER_SESSION_TTL": "5"})

    assert result.exit_code == 2
    assert result.stderr == (
        "Error: TORCHMOOR_HANDLER_SESSION_TTL is not a setting; docs/configuration.md lists them all\n"
    )


@pytest.mark.parametrize("plane", ["--port", "--admin-port"])
def test_a_port_in_use_is_an_error_before_anything_starts(tmp_path: Path, plane: str) -> None:
    """A port in use exits with status 1 and is named, and no instance is started."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        ports = {"--port": "0", "--admin-port": "0", plane: port}
        result = invoke(
            *("up", "--model-store", str(tmp_path), "--run-dir", str(tmp_path / "run")),
            *(part for pair in ports.items() for part in pair),
        )

    assert result.exit_code == 1
    assert result.stdout == ""
    assert port in result.stderr
    assert f"the port is in use, perhaps by another fleet (torchmoor status); give another {plane} (" in result.stderr
    assert "starting" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error names the run directory and does not blame the address."""
    (tmp_path / "file").touch()
    run_dir = tmp_path / "file" / "run"

    result = invoke("up", "--port", "0", "--admin-port", "0", "--run-dir", str(run_dir))

    assert result.exit_code == 1
    assert f"cannot write to the directory {run_dir}: Not a directory" in result.stderr
    assert "listen" not in result.stderr


@pytest.mark.parametrize("options", [(), ("--endpoint", "many", "--models"), ("--adapters",)], ids=" ".join)
def test_a_model_that_cannot_be_accessed_is_named(options: tuple[str, ...]) -> None:
    """The error of the file system names the folder, and does not blame the address."""
    folder = f"/{'a' * 300}"  # root may read everything else

    result = invoke("up", "--port", "0", "--admin-port", "0", *options, folder)

    assert (result.exit_code, result.stderr) == (1, f"Error: cannot access {folder}: File name too long\n")


def test_a_host_without_a_temporary_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a read-only root; the error does not blame the address."""
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")

    result = invoke("up", "--port", "0", "--admin-port", "0")

    assert result.exit_code == 1
    assert "cannot make a temporary run directory: No such file or directory; name one (--run-dir" in result.stderr
    assert "listen" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--late-binding",), 2, "--late-binding needs --capacity"),
        (("--instances", "0"), 2, "--instances 0 needs --min-instances 0"),
        (("--min-instances", "3", "--max-instances", "2"), 1, "--max-instances must be 3 (--min-instances) or more"),
        (
            ("--min-instances", "3", "--instances", "2"),
            1,
            "Error: --instances must be 3 (--min-instances) or more, not 2",
        ),
        (("--max-instances", "2", "--instances", "3"), 1, "instances must be 2 (--max-instances) or less, not 3"),
        (("--async-output", "https://b/prefix"), 1, "must be s3://bucket or s3://bucket/prefix, not 'https://b"),
        (("--async-failure", "https://b/prefix"), 1, "must be s3://bucket or s3://bucket/prefix, not 'https://b"),
        *((("--journal", kind), 1, "must be file:///a/directory, redis://") for kind in ("redis", "file", "s3")),
        (("--journal", "ftp://host"), 1, "Error: --journal must be file:///"),
        (("--tls-cert", "cert.pem"), 1, "Error: --tls-cert needs --tls-key: give both, or neither"),
        (("--port", "8080", "--admin-port", "8080"), 1, "Error: --admin-port and --port are both 8080"),
        (("--host", "0.0.0.0"), 1, "--no-auth"),
        (("--endpoint", "llm", "--endpoint", "llm"), 1, "different names"),
        (("--strategy", "BEST"), 2, "--strategy"),
        (("--log-level", "loud"), 2, "--log-level"),
        (("--port", "80800"), 2, "80800"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_start(
    arguments: tuple[str, ...], status: int, said: str
) -> None:
    """A usage error has status 2. The error says what to do, and names options: `up` has no file with other names."""
    result = invoke("up", *arguments)

    assert result.exit_code == status
    assert said in result.stderr
    assert "starting" not in result.stderr


@pytest.mark.parametrize("host", ["http://10.0.0.5", "images.internal:8000", "10.0.0.0/33", "a/b", "[::1]", ""])
def test_an_image_host_that_no_address_can_have_is_refused(host: str) -> None:
    """It would have no effect, and images from the host that is meant would be refused."""
    result = invoke("up", "--allow-image-host", host)

    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: --allow-image-host must be names, addresses or CIDR blocks, without scheme and port, not {host!r}\n"
    )


@pytest.mark.parametrize("host", ["10.0.0.5", "10.0.0.0/8", "fd00::/8", "::1", "localhost", "a_b.Images.internal"])
def test_an_image_host_is_a_name_an_address_or_a_block(host: str) -> None:
    """The forms that a worker compares with an image's host and its addresses."""
    assert UpSettings(allowed_image_hosts=(host,)).allowed_image_hosts == (host,)


@pytest.mark.parametrize(
    "journal",
    ["ftp://user:secret@host/x", "/var/lib/journal", "sqlite:///x", "s3:/bucket/x", "s3:bucket", "s3:///bucket/x"],
)
def test_a_journal_that_no_instance_can_open_is_refused(journal: str) -> None:
    """A journal that no instance can open is refused before the start.

    The error omits it, as it may have a password.
    """
    result = invoke("up", "--journal", journal)

    assert result.exit_code == 1
    assert "must be file:///a/directory, redis://" in result.stderr
    assert journal not in result.stderr
    assert "secret" not in result.stderr


@pytest.mark.parametrize("journal", ["s3://bucket", "S3://bucket/prefix", "file:/a/directory", "redis://host"])
def test_a_journal_that_instances_can_open_is_accepted(journal: str) -> None:
    """The prefix in a bucket, and a server's port and database, may be left out."""
    assert UpSettings(journal=journal).journal == journal


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ((), None),
        (("--instances", "3"), None),
        (("--min-instances", "0"), (0, 1, 0)),
        (("--min-instances", "2"), (2, 2, 2)),
        (("--max-instances", "4"), (1, 4, 1)),
        (("--instances", "2", "--max-instances", "4"), (1, 4, 2)),
        (("--instances", "0", "--max-instances", "4"), (0, 4, 0)),
        (("--min-instances", "0", "--instances", "3"), (0, 3, 3)),
    ],
)
def test_numbers_of_instances_follow_from_one_another(
    arguments: tuple[str, ...], numbers: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing numbers of instances follow from the others; without any, there is one that stays."""
    scaling = settings_of(monkeypatch, *arguments).variant_scaling()

    found = None if scaling is None else (scaling.min_capacity, scaling.max_capacity, scaling.initial_count)
    assert found == numbers


def test_a_short_cooldown_is_not_lengthened_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added instances stay for 300 s, or for the scale-in cool-down if that is shorter."""
    settings = settings_of(monkeypatch, "--min-instances", "0", "--scale-in-cooldown", "7", "--max-hold", "9")

    assert settings.variant_scaling() == ScalingSettings(
        tracking=TargetTracking(scale_in_cooldown_s=7, scale_out_cooldown_s=7),
        step=StepScaling(cooldown_s=7),
        max_hold_s=9,
    )


def test_an_announcement_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An announcement file that cannot be written is not reported as a failure to listen."""

    async def announce(options: UpSettings, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torchmoor.cli.commands.up.run", announce)

    result = invoke("up")

    assert result.exit_code == 1
    assert result.stderr == "Error: the output cannot be written: No space left on device\n"


def test_a_missing_archive_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    """The error for a missing archive, as in a new clone, says how to create it, and which others there are."""
    arguments = ("up", "--port", "0", "--admin-port", "0", "--model-store", str(tmp_path))
    result = invoke(*arguments)
    (tmp_path / "lava.mar").touch()
    mistyped = invoke(*arguments)

    assert result.exit_code == 1
    assert result.stdout == ""
    assert "make archives" in result.stderr
    assert f"there is no llava.mar in {tmp_path}: serve" in result.stderr
    assert f"there is no llava.mar in {tmp_path}, but lava.mar: serve" in mistyped.stderr


def test_session_keys_that_cannot_be_read_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the key by its id, never by its digits."""
    monkeypatch.setenv("TORCHMOOR_SESSION_KEYS", "k0:not-hexadecimal")

    result = invoke("up")

    assert result.exit_code == 1
    assert "k0" in result.stderr
    assert "not-hexadecimal" not in result.stderr


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two directories with a checkpoint's configuration."""
    for name in ("My_Llava.2", "text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return [str(tmp_path / name) for name in ("My_Llava.2", "text")]


def test_models_have_the_names_in_their_order(monkeypatch: pytest.MonkeyPatch, folders: list[str]) -> None:
    """Names may precede or follow their models; without --endpoint there is no demo model beside them."""
    one, two = folders
    settings = settings_of(monkeypatch, one, "--name", "seeing", two, "--name", "text", "--instances", "2")

    assert find_checkpoints(settings) == [Checkpoint("seeing", one), Checkpoint("text", two)]
    assert settings.endpoints == ()
    assert settings_of(monkeypatch, one, "--endpoint", "llm").endpoints == ("llm",)
    assert settings_of(monkeypatch).endpoints == ("llava",)


def test_a_model_without_a_name_has_that_of_its_place(monkeypatch: pytest.MonkeyPatch, folders: list[str]) -> None:
    """A model's default name is the last part of its path or URL, with hyphens for characters that names lack."""
    settings = settings_of(
        monkeypatch, folders[0], "s3://bucket/models/tiny-llava/", "hf://org/Smol.LM2", "hf://org/other@v1.2"
    )

    assert find_checkpoints(settings) == [
        Checkpoint("My-Llava-2", folders[0]),
        Checkpoint("tiny-llava", "s3://bucket/models/tiny-llava/"),
        Checkpoint("Smol-LM2", "hf://org/Smol.LM2"),
        Checkpoint("other", "hf://org/other@v1.2"),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{0}", "{1}", "--name", "a"), "MODEL and --name differ in number (2 and 1)"),
        (("--name", "a"), "--name is the name of a MODEL"),
        (("{0}", "--name", "my model"), "my-model is possible"),
        (("{0}", "--name", "many"), "must not be many"),
        (("{0}", "--name", "a", "{1}", "--name", "A"), "different names"),
        (("{0}", "--name", "llava", "--endpoint", "llava"), "different names"),
        (("{0}/..",), "no config.json in"),
        (("org/model",), "hf://org/model"),
        (("{0}/weights.mar",), "is an archive: serve it with --model-store"),
        (("{0}/model.gguf",), "is a file: give the directory that save_pretrained wrote"),
        (("s3://bucket",), "s3://bucket/prefix"),
        (("s3:/bucket/prefix",), "must be a directory, s3://bucket/prefix or hf://"),
        (("hf://org/model/file",), "must be hf://owner/name"),
        (("hf://org/model@",), "hf://owner/name, with @revision"),
        (("hf://org/model@a b",), "hf://owner/name, with @revision"),
        (("https://host/model",), "s3://bucket/prefix or hf://owner/name"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_remedy(
    arguments: tuple[str, ...], said: str, folders: list[str]
) -> None:
    """A model that cannot be served is refused before the start, with advice."""
    for name in ("weights.mar", "model.gguf"):
        (Path(folders[0]) / name).touch()

    result = invoke("up", *(each.format(*folders) for each in arguments))

    assert result.exit_code == 1
    assert said in result.stderr
    assert "starting" not in result.stderr


@pytest.mark.parametrize("variable", ["HF_MODEL_ID", "OPTION_MODEL_ID", "TORCHMOOR_HANDLER_MODEL_PATH"])
def test_a_variable_is_the_model_of_one_named_endpoint_only(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text model must not be served as llava, nor be the model of two endpoints."""
    monkeypatch.setenv(variable, "/models/text")

    unnamed = invoke("up")
    both = invoke("up", "--endpoint", "llava", "--endpoint", "llm")
    one = settings_of(monkeypatch, "--endpoint", "llm", "hf://org/other")

    assert unnamed.exit_code == both.exit_code == 1
    assert "no option names the endpoint" in unnamed.stderr
    assert "would be the model of llava and llm" in both.stderr
    check_environment(one, {variable: "/models/text"})


def test_a_checkpoint_packaged_for_many_models_is_refused(tmp_path: Path) -> None:
    """A checkpoint packaged for many models is refused, since TorchServe would report a missing module."""
    with zipfile.ZipFile(tmp_path / "minilm.mar", "w") as bundle:
        bundle.writestr("config.json", "{}")

    result = invoke(
        *("up", "--port", "0", "--admin-port", "0", "--model-store", str(tmp_path), "--endpoint", "minilm"),
        *("--run-dir", str(tmp_path / "run")),
    )

    assert result.exit_code == 1
    assert f"torchmoor up --endpoint many --models {tmp_path}" in result.stderr


def test_limits_of_created_endpoints_have_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of created endpoints are options, since only torchmoor up has a control plane, and it reads no file."""
    arguments = ("--control-plane", "--removal-timeout", "60", "--drain-timeout", "5.5", "--max-model-bytes", "9")
    control = settings_of(monkeypatch, *arguments, "--max-created-resources", "2000").control

    assert (control.removal_timeout_s, control.drain_timeout_s, control.max_model_bytes) == (60.0, 5.5, 9)
    assert control.max_resources == 2000
