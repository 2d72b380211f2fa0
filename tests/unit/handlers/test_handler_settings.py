"""The handler's settings and the parts that they start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError

from handlers.chat_entry import ChatHandler
from handlers.errors import SettingsError
from handlers.settings.handler import HandlerSettings, check_variables, load_settings
from handlers.torchserve.start_chat import start_chat
from handlers.worker.device import choose_device


def test_defaults_need_nothing() -> None:
    """The defaults are a working configuration."""
    assert load_settings({}, {}) == HandlerSettings()


def test_file_sets_values() -> None:
    """The model-config sets groups and keys; whole numbers are accepted for fractions."""
    intake = {"total_timeout_s": 5, "allowed_hosts": ["10.0.0.0/8"]}

    loaded = load_settings({"session": {"ttl_s": 60}, "intake": intake, "engine": None, "pump": []}, {})

    assert loaded.session.ttl_s == 60
    assert loaded.intake.total_timeout_s == 5.0
    assert isinstance(loaded.intake.total_timeout_s, float)
    assert loaded.intake.allowed_hosts == ("10.0.0.0/8",)
    assert loaded.engine == HandlerSettings().engine
    assert loaded.pump == HandlerSettings().pump


@pytest.mark.parametrize("roots", ['["/a","/b"]', "/a,models", "~/models", "[/a]"])
def test_roots_of_urls_are_absolute_paths(roots: str) -> None:
    """A list of roots in JSON is refused, because it would be split at its commas."""
    with pytest.raises(SettingsError, match=r"handler\.many\.url_roots must be absolute paths, with commas"):
        load_settings({}, {"TORCHMOOR_HANDLER_MANY_URL_ROOTS": roots})
    assert load_settings({}, {"TORCHMOOR_HANDLER_MANY_URL_ROOTS": "/a, /b"}).many.url_roots == ("/a", "/b")


def test_environment_beats_the_file() -> None:
    """TORCHMOOR_HANDLER_<GROUP>_<KEY> is parsed as the setting's own type."""
    environ = {
        "TORCHMOOR_HANDLER_SESSION_TTL_S": "30",
        "TORCHMOOR_HANDLER_INTAKE_ALLOWED_HOSTS": " 127.0.0.1, images.internal,,",
        "TORCHMOOR_HANDLER_INTAKE_ALLOW_URLS": "False",
        "TORCHMOOR_HANDLER_PUMP_STREAM_WAIT_S": "0.5",
        "TORCHMOOR_HANDLER_MODEL_PATH": "/models/x",
        "UNRELATED": "x",
    }

    loaded = load_settings({"session": {"ttl_s": 60, "max_images": 3}}, environ)

    assert (loaded.session.ttl_s, loaded.session.max_images) == (30, 3)
    assert loaded.intake.allowed_hosts == ("127.0.0.1", "images.internal")
    assert loaded.intake.allow_urls is False
    assert loaded.pump.stream_wait_s == 0.5
    assert loaded.model.path == "/models/x"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"sesion": {}}, r"handler\.sesion is not a group .* Did you mean session\?$"),
        ({1: {}}, r"handler\.1 is not a group"),
        ({"session": {"ttl": 5}}, r"handler\.session\.ttl is not a setting; .* Did you mean ttl_s\?$"),
        ({"session": {1: 5}}, "handler.session.1"),
        ({"session": 5}, "handler.session"),
        ({"session": ["ttl_s"]}, "handler.session"),
        ({"session": "ttl_s"}, "handler.session"),
        ({"session": {"ttl_s": "soon"}}, "handler.session.ttl_s"),
        ({"session": {"ttl_s": 1.5}}, "handler.session.ttl_s"),
        ({"session": {"ttl_s": True}}, "handler.session.ttl_s"),
        ({"session": {"ttl_s": None}}, "handler.session.ttl_s"),
        ({"session": {"ttl_s": [5]}}, "handler.session.ttl_s"),
        ({"intake": {"allow_urls": "maybe"}}, "handler.intake.allow_urls"),
        ({"intake": {"allow_urls": 2}}, "handler.intake.allow_urls"),
        ({"intake": {"allowed_hosts": 5}}, "handler.intake.allowed_hosts"),
        ({"intake": {"total_timeout_s": "nan"}}, "handler.intake.total_timeout_s"),
        ({"intake": {"total_timeout_s": float("inf")}}, "handler.intake.total_timeout_s must be finite, not inf"),
        ({"vllm": {"options": "[" * 100_000}}, "handler.vllm.options"),
        ({"model": {"path": None}}, "handler.model.path"),
        ({"model": {"dtype": "int8"}}, "handler.model.dtype"),
        ({"session": {"budget_bytes": 0}}, "handler.session.budget_bytes"),
        ({"session": {"max_sessions": -1}}, "handler.session.max_sessions"),
        ({"session": {"max_waiting_turns": -1}}, "handler.session.max_waiting_turns"),
        ({"session": {"max_tombstones": -1}}, "handler.session.max_tombstones"),
        ({"session": {"ttl_s": 100, "max_ttl_s": 99}}, "handler.session.max_ttl_s"),
        ({"intake": {"total_timeout_s": 0}}, "handler.intake.total_timeout_s"),
        ({"intake": {"max_redirects": -1}}, "handler.intake.max_redirects"),
        ({"intake": {"max_aspect_ratio": 0}}, "handler.intake.max_aspect_ratio"),
        ({"engine": {"max_rows": 0}}, "handler.engine.max_rows"),
        ({"engine": {"max_new_tokens": 100, "max_new_tokens_limit": 99}}, "handler.engine.max_new_tokens_limit"),
        ({"pump": {"max_response_bytes": 0}}, "handler.pump.max_response_bytes"),
        ({"many": {"cache": "maybe"}}, "handler.many.cache"),
        ({"many": {"device_bytes": -1}}, "handler.many.device_bytes"),
        ({"many": {"num_loaders": 0}}, "handler.many.num_loaders"),
    ],
)
def test_wrong_settings_are_named(config: dict[str, Any], named: str) -> None:
    """Unknown groups and keys, wrong types and values out of range stop the worker with a RuntimeError."""
    with pytest.raises(SettingsError, match=named) as caught:
        load_settings(config, {})

    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    ("name", "value"),
    [("SESSION_TTL_S", "soon"), ("SESSION_TTL_S", ""), ("INTAKE_ALLOW_URLS", "yes"), ("PUMP_MAX_IN_FLIGHT", "-1")],
)
def test_wrong_environment_is_named(name: str, value: str) -> None:
    """A value from the environment is checked like one from the file."""
    with pytest.raises(SettingsError, match=name.partition("_")[2].lower()):
        load_settings({}, {f"TORCHMOOR_HANDLER_{name}": value})


def test_variables_are_checked_without_the_model_config() -> None:
    """Wrong values are found; contradictions are not, because the model-config may have one of the values."""
    too_small = {"TORCHMOOR_HANDLER_SESSION_MAX_TTL_S": "1", "TORCHMOOR_HANDLER_JOURNAL_MAX_IMAGE_BYTES": "1"}

    check_variables({**too_small, "PATH": "/bin"})
    with pytest.raises(SettingsError):
        load_settings({}, too_small)
    with pytest.raises(SettingsError, match=r"^handler\.pump\.max_in_flight must be of type int, not 'x'$"):
        check_variables({**too_small, "TORCHMOOR_HANDLER_PUMP_MAX_IN_FLIGHT": "x"})
    with pytest.raises(SettingsError, match=r"^TORCHMOOR_HANDLER_PUMP is not a setting"):
        check_variables({"TORCHMOOR_HANDLER_PUMP": "x"})


def test_shipped_config_is_valid() -> None:
    """The archive's model-config has known settings, and a larger batch than the handler's limit."""
    path = Path(__file__).parents[3] / "handlers" / "configs" / "chat.yaml"
    config = yaml.safe_load(path.read_text())

    loaded = load_settings(config["handler"], {})

    assert config["batchSize"] > loaded.pump.max_in_flight
    assert config["continuousBatching"] is True
    assert (config["minWorkers"], config["maxWorkers"], config["maxBatchDelay"]) == (1, 1, 1)


def test_settings_are_frozen() -> None:
    """Settings cannot change after the start."""
    loaded = load_settings({}, {})

    for group in HandlerSettings.model_fields:
        settings = getattr(loaded, group)
        with pytest.raises(ValidationError, match="frozen"):
            setattr(settings, next(iter(type(settings).model_fields)), 1)


def test_device_is_the_assigned_one() -> None:
    """Without one assigned, the device is the CPU."""
    assert choose_device(None) == torch.device("cpu")


def test_gpu_that_torch_cannot_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with an unusable GPU does not start; serving from the CPU would be slow without a visible reason."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(SettingsError, match=r"assigned GPU 1, but torch .* cannot use it: the NVIDIA driver is"):
        choose_device(1)


@pytest.mark.parametrize(
    ("config", "environ"),
    [
        ({"model": {"path": "nowhere"}}, {}),
        ({"nonsense": {}}, {}),
        ({}, {"TORCHMOOR_SESSION_KEYS": "bad"}),
    ],
)
def test_worker_does_not_start_on_a_wrong_setting(
    config: dict[str, Any], environ: dict[str, str], checkpoint: Path
) -> None:
    """Every wrong setting raises RuntimeError, the only kind that TorchServe reports well."""
    config = {"batchSize": 128, "handler": {"model": {"path": checkpoint.name}, **config}}

    with pytest.raises(RuntimeError):
        start_chat(checkpoint.parent, None, config, environ)


def test_more_requests_than_rows_are_a_wrong_setting(checkpoint: Path) -> None:
    """A limit beyond TorchServe's batch is refused, because requests would wait in TorchServe unseen."""
    config = {"batchSize": 112, "handler": {"model": {"path": checkpoint.name}}}

    with pytest.raises(SettingsError, match="max_in_flight must be below the archive's batchSize"):
        start_chat(checkpoint.parent, None, config, {})


@pytest.mark.usefixtures("kept_loggers")
def test_entry_starts_a_worker(
    checkpoint: Path, metrics_cache: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TorchServe calls initialize with the archive's directory, then handle; the metrics are started."""
    monkeypatch.setenv("TORCHMOOR_INSTANCE", "n-1")
    context: Any = SimpleNamespace(
        system_properties={"model_dir": str(checkpoint.parent), "gpu_id": None},
        model_yaml_config={"batchSize": 128, "handler": {"model": {"path": checkpoint.name}}},
        request_ids={},
        stopping_criteria=None,
        metrics=metrics_cache,
        model_name="llava",
    )
    handler = ChatHandler()

    handler.initialize(context)

    assert handler.handle([], context) == []
    assert handler.service.status()["instance"] == "n-1"
    for publisher in handler.publishers:
        publisher.stop()
    handler.service.stop()
    assert "[METRICS]torchmoor_sessions_max." in caplog.text


def test_misspelt_variable_is_refused() -> None:
    """A misspelt variable with our prefix is an error; other variables are ignored."""
    with pytest.raises(SettingsError, match="TORCHMOOR_HANDLER_SESSION_TTL"):
        load_settings({}, {"TORCHMOOR_HANDLER_SESSION_TTL": "5", "PATH": "/bin"})
