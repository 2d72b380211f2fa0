"""The parts of a TorchServe instance: folders, configuration, environment, command."""

from pathlib import Path

import pytest

from torchmoor.errors import LaunchError
from torchmoor.fleet.torchserve import (
    MAX_TMPDIR_BYTES,
    InstanceSpec,
    TorchServeSettings,
    environment,
    find_java_home,
    prepare,
    render_config,
)

PORTS = (20001, 20002, 20003, 20004, 20005)


def make_spec(folder: Path, *, gpu: str | None = None, **variables: str) -> InstanceSpec:
    return InstanceSpec(
        name="llava-0",
        endpoint="llava",
        archive="llava.mar",
        folder=folder,
        ports=PORTS,
        gpu=gpu,
        environment=variables,
    )


def parse(config: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in config.splitlines())


@pytest.fixture
def settings(tmp_path: Path) -> TorchServeSettings:
    return TorchServeSettings(model_store=tmp_path / "store")


def test_the_model_is_named_after_its_archive(tmp_path: Path) -> None:
    """The model is named after its archive, so requests for llava.mar go to /predictions/llava."""
    assert make_spec(tmp_path).model == "llava"


def test_every_address_is_loopback_and_has_a_port_of_its_own(tmp_path: Path, settings: TorchServeSettings) -> None:
    """Every address is on loopback with a separate port, because an instance accepts requests without a token."""
    values = parse(render_config(make_spec(tmp_path), settings))

    addresses = [values[f"{plane}_address"] for plane in ("inference", "management", "metrics")]
    assert [f"http://127.0.0.1:{port}" for port in PORTS[:3]] == addresses
    assert [values["grpc_inference_address"], values["grpc_management_address"]] == ["127.0.0.1"] * 2
    assert [str(port) for port in PORTS[3:]] == [values["grpc_inference_port"], values["grpc_management_port"]]
    assert values["disable_token_authorization"] == "true"


def test_the_configuration_loads_the_archive_under_its_name_and_never_times_a_client_out(
    tmp_path: Path, settings: TorchServeSettings
) -> None:
    """A renamed archive is loaded under its file name, not its manifest's.

    clientTimeoutInMills is never set, because TorchServe's streams would hang.
    """
    values = parse(render_config(make_spec(tmp_path), settings))

    assert values["load_models"] == "llava=llava.mar"
    assert {"max_request_size", "max_response_size", "job_queue_size"} <= values.keys()
    assert not [key for key in values if "timeout" in key.lower()]


@pytest.mark.parametrize(("gpu", "count"), [(None, "0"), ("3", "1")])
def test_an_instance_has_one_gpu_or_none(
    tmp_path: Path, settings: TorchServeSettings, gpu: str | None, count: str
) -> None:
    """TorchServe sees only the GPU that the launcher gave it."""
    spec = make_spec(tmp_path, gpu=gpu)

    values, variables = parse(render_config(spec, settings)), environment(spec, settings)

    assert count == values["number_of_gpu"]
    if gpu is not None:
        assert gpu == variables["CUDA_VISIBLE_DEVICES"]


def test_the_flags_of_a_new_java_are_for_our_own_java_only(tmp_path: Path) -> None:
    """Java 17 does not start when it is given --sun-misc-unsafe-memory-access."""
    spec = make_spec(tmp_path)

    own = parse(render_config(spec, TorchServeSettings(model_store=tmp_path)))["vmargs"]
    other = parse(render_config(spec, TorchServeSettings(model_store=tmp_path, java_home=tmp_path)))["vmargs"]

    assert "--sun-misc-unsafe-memory-access=allow" in own
    assert "--" not in other


def test_each_instance_has_folders_of_its_own(tmp_path: Path, settings: TorchServeSettings) -> None:
    """Sockets, pid file, logs and working directory of an instance are its own."""
    names = ("TMPDIR", "TEMP", "LOG_LOCATION", "METRICS_LOCATION")
    given = dict.fromkeys(names, "/tmp")  # of the model, as in CreateModel's Environment
    specs = [make_spec(tmp_path / name, **given) for name in ("a", "b")]

    for spec in specs:
        prepare(spec, settings)

    for spec in specs:
        variables = environment(spec, settings)
        for name in names:
            assert Path(variables[name]).is_dir()
            assert Path(variables[name]).is_relative_to(spec.folder)
        assert list((spec.folder / "work").iterdir()) == [], "the working directory is first on the class path"


def test_a_pid_file_of_an_earlier_run_is_removed(tmp_path: Path, settings: TorchServeSettings) -> None:
    """An old pid file is removed, because its number may belong to another process by now."""
    spec = make_spec(tmp_path)
    spec.temporary.mkdir()
    spec.pid_file.write_text("1")

    prepare(spec, settings)

    assert not spec.pid_file.exists()


def test_the_command_runs_in_the_foreground_without_snapshots(tmp_path: Path, settings: TorchServeSettings) -> None:
    """TorchServe runs in the foreground, so that the launcher sees its end, and without snapshots of earlier models."""
    command = prepare(make_spec(tmp_path), settings)

    assert {"--foreground", "--ncs"} <= set(command)
    for option in ("--ts-config", "--log-config"):
        assert Path(command[command.index(option) + 1]).is_file()
    assert str(settings.model_store) == command[command.index("--model-store") + 1]


@pytest.mark.parametrize("name", ["x" * MAX_TMPDIR_BYTES, "é" * (MAX_TMPDIR_BYTES // 2)], ids=["x", "é"])
def test_a_path_too_long_for_a_socket_is_an_error_that_names_the_option(
    settings: TorchServeSettings, name: str
) -> None:
    """TorchServe itself would only report a worker that does not connect. The limit is one of bytes."""
    spec = make_spec(Path("/tmp", name))

    with pytest.raises(LaunchError, match="--run-dir"):
        prepare(spec, settings)


def test_nothing_inherited_redirects_java_or_torchserve(
    tmp_path: Path, settings: TorchServeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TS_CONFIG_FILE or _JAVA_OPTIONS of the user's shell is removed, because it would override the launcher."""
    for name in ("TS_CONFIG_FILE", "TS_INFERENCE_ADDRESS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("HTTPS_PROXY", "kept")

    variables = environment(make_spec(tmp_path), settings)

    assert "theirs" not in variables.values()
    assert variables["HTTPS_PROXY"] == "kept"


def test_an_instance_knows_its_name_whatever_the_environment_says(tmp_path: Path, settings: TorchServeSettings) -> None:
    """The environment cannot change an instance's name, which session ids contain."""
    spec = make_spec(tmp_path, TORCHMOOR_INSTANCE="other", TORCHMOOR_SESSION_KEYS="k0:00")

    variables = environment(spec, settings)

    assert variables["TORCHMOOR_INSTANCE"] == "llava-0"
    assert variables["TORCHMOOR_SESSION_KEYS"] == "k0:00"


def test_a_java_home_without_java_is_an_error_that_names_it(tmp_path: Path) -> None:
    """A Java home without Java is an error that names the directory and the variable."""
    with pytest.raises(
        LaunchError, match=f"there is no bin/java in {tmp_path}, which TORCHMOOR_JAVA_HOME names: unset it"
    ):
        find_java_home(tmp_path)


def test_a_value_reaches_java_unchanged(tmp_path: Path) -> None:
    """Java's Properties would drop a backslash, join a line that ends in one, and read UTF-8 as Latin-1."""
    properties = {"allowed_urls": "https://models\\.example/é.*,\\\\", "job_queue_size": "7"}
    settings = TorchServeSettings(model_store=tmp_path, properties=properties)

    lines = render_config(make_spec(tmp_path), settings).splitlines()

    assert r"allowed_urls=https://models\\.example/\u00e9.*,\\\\" in lines
    assert "job_queue_size=7" in lines
