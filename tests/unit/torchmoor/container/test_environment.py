"""A container's environment variables: what is accepted and what is refused."""

from pathlib import Path

import pytest

from torchmoor.container.environment import ContainerEnvironment, read_environment
from torchmoor.errors import ConfigError


def test_without_variables_the_platform_gets_what_it_expects() -> None:
    """The defaults are what SageMaker expects: port 8080, the model in /opt/ml/model, 60 s for an answer."""
    told = read_environment({})

    assert (told.port, str(told.model_dir), told.model_timeout_s) == (8080, "/opt/ml/model", 60.0)
    assert told.drain_s < 30, "SageMaker's SIGKILL comes 30 s after its SIGTERM"
    assert told.safe_ports is None
    assert not told.is_multi_model
    assert told.properties == {}


def test_sagemakers_variables_are_read() -> None:
    """Variables of SageMaker and of AWS's inference toolkit are read."""
    told = read_environment(
        {
            "SAGEMAKER_BIND_TO_PORT": "9000",
            "SAGEMAKER_SAFE_PORT_RANGE": "21000-21099",
            "SAGEMAKER_MULTI_MODEL": "True",
            "SAGEMAKER_MODEL_SERVER_TIMEOUT": "120",
            "SAGEMAKER_MODEL_SERVER_WORKERS": "2",
            "SAGEMAKER_TS_RESPONSE_TIMEOUT": "90",
            "SAGEMAKER_CONTAINER_LOG_LEVEL": "20",
        }
    )

    assert told.port == 9000
    assert told.safe_ports == range(21_000, 21_100)
    assert told.is_multi_model
    assert told.model_timeout_s == 120.0
    assert told.properties == {"default_workers_per_model": "2", "default_response_timeout": "90"}
    assert told.log_level == "INFO"


def test_torchserves_variables_become_lines_of_its_configuration() -> None:
    """By TorchServe's rule, TS_ and the key in capitals set a key; they take precedence over the toolkit's names."""
    told = read_environment({"TS_MAX_REQUEST_SIZE": "1048576", "TS_ALLOWED_URLS": "s3://models/.*"})

    assert told.properties == {"max_request_size": "1048576", "allowed_urls": "s3://models/.*"}
    both = read_environment({"SAGEMAKER_TS_RESPONSE_TIMEOUT": "90", "TS_DEFAULT_RESPONSE_TIMEOUT": "30"})
    assert both.properties == {"default_response_timeout": "30"}


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("TS_DISABLE_TOKEN_AUTHORIZATION", "true", "false"),
        ("TS_HEADER_KEY_SEQUENCE_ID", "X-Amzn-SageMaker-Session-Id", "x-my-session"),
        ("TS_REQUEST_SEQUENCE_END", "X-Amzn-SageMaker-Closed-Session-Id", "x-my-end"),
    ],
)
def test_what_is_so_anyway_is_no_error(name: str, value: str, other: str) -> None:
    """Variables that the LLaVA sample sets for AWS's image are accepted with the values that this image has anyway."""
    assert read_environment({name: value}).properties == {}
    with pytest.raises(ConfigError, match=f"^{name} cannot be set here"):
        read_environment({name: other})


def test_system_metrics_can_be_switched_on() -> None:
    """AWS's deep learning containers for GPUs switch them off, as this image does; its LLaVA sample does not."""
    assert read_environment({"TS_DISABLE_SYSTEM_METRICS": "true"}).properties == {}
    told = read_environment({"TS_DISABLE_SYSTEM_METRICS": "false"})
    assert told.properties == {"disable_system_metrics": "false"}


def test_a_configuration_file_of_torchserves_counts_as_far_as_it_may(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys that the image sets itself are ignored with a log message, and variables take precedence.

    The file may be missing.
    """
    file = tmp_path / "config.properties"
    file.write_text(
        "# AWS's\ninference_address=http://0.0.0.0:8080\ndefault_response_timeout = 200\njob_queue_size=9\n"
    )
    variables = {"TS_CONFIG_FILE": str(file), "TS_JOB_QUEUE_SIZE": "7"}

    assert read_environment(variables).properties == {"default_response_timeout": "200", "job_queue_size": "7"}
    assert "inference_address in" in caplog.text
    assert read_environment({"TS_CONFIG_FILE": "/nowhere/config.properties"}).properties == {}
    assert "there is no /nowhere/config.properties" in caplog.text
    file.write_text("job_queue_size=many\n")
    with pytest.raises(ConfigError, match=r"^job_queue_size in .* must be a number"):
        read_environment(variables)


def test_a_configuration_file_is_read_as_java_reads_it(tmp_path: Path) -> None:
    """A backslash continues a line or escapes a sign, and a colon or a blank may separate key and value."""
    file = tmp_path / "config.properties"
    file.write_text(
        "# a comment \\\nallowed_urls=https://a/.*,\\\n   https://b\\\\.c/\\u00e9.*\njob_queue_size: 9\n"
        'netty_client_threads 3\nmodels={\\\n  "job_queue_size=1": {}}\n'
    )

    assert read_environment({"TS_CONFIG_FILE": str(file)}).properties == {
        "allowed_urls": r"https://a/.*,https://b\.c/é.*",
        "job_queue_size": "9",
        "netty_client_threads": "3",
    }


@pytest.mark.parametrize("sign", ["t", "n", "r", "f"])
def test_an_escaped_control_character_is_refused_as_an_unescaped_one(tmp_path: Path, sign: str) -> None:
    r"""Java reads `\t` as a tab, not as the letter t."""
    file = tmp_path / "config.properties"
    file.write_text(f"allowed_urls=https://a\\{sign}b\n")

    with pytest.raises(ConfigError, match="must be one line of text"):
        read_environment({"TS_CONFIG_FILE": str(file)})


def test_an_instance_has_the_hosts_name_unless_it_is_told_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance is named after its host, such as the pod llava-0, in a form that session ids can contain."""
    monkeypatch.setattr("socket.gethostname", lambda: "Node_7.Example.ORG")

    assert read_environment({}).instance_name == "node-7-example-org"
    assert read_environment({"TORCHMOOR_INSTANCE_NAME": "llava-0"}).instance_name == "llava-0"


def test_empty_variables_say_nothing() -> None:
    """Empty variables, which templates of Kubernetes and CloudFormation leave, count as not set."""
    told = read_environment(
        {"SAGEMAKER_BIND_TO_PORT": "", "TORCHMOOR_MODEL": " ", "SAGEMAKER_PROGRAM": "", "TORCHMOOR_INSTANCE_NAME": "a"}
    )

    assert told == ContainerEnvironment(instance_name="a")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SAGEMAKER_BIND_TO_PORT", "http", "a whole number"),
        ("SAGEMAKER_BIND_TO_PORT", "70000", "from 1 to 65535"),
        ("SAGEMAKER_BIND_TO_PORT", "8_080", "a whole number"),
        ("TORCHMOOR_CAPACITY", "+5", "a whole number"),
        ("TORCHMOOR_CAPACITY", "-5", "a whole number"),
        ("TORCHMOOR_HEAP_MIB", "127", "128 or more"),
        ("TORCHMOOR_START_TIMEOUT_S", "90000", "above 0 and at most 86400"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "21999-21000", "two ports such as 21000-21999"),
        ("SAGEMAKER_MULTI_MODEL", "yes", "true or false"),
        ("SAGEMAKER_MODEL_SERVER_TIMEOUT", "0", "above 0 and at most 86400"),
        ("SAGEMAKER_MODEL_SERVER_TIMEOUT", "nan", "a number"),
        ("SAGEMAKER_MODEL_SERVER_WORKERS", "many", "a number above 0"),
        ("SAGEMAKER_CONTAINER_LOG_LEVEL", "15", "one of DEBUG"),
        ("TORCHMOOR_INSTANCES", "0", "positive"),
        ("TORCHMOOR_INSTANCE_NAME", "Llava_0", "single hyphens"),
        ("TS_MAX_REQUEST_SIZE", "6MB", "a number above 0"),
        ("TS_MAX_REQUEST_SIZE", str(3 << 30), "at most 2147483647"),
        ("TS_MAX_REQUEST_SIZE", "9" * 5000, "at most 2147483647"),
        ("TS_PREFER_DIRECT_BUFFER", "1", "true or false"),
        ("TS_ALLOWED_URLS", "a\nmodel_store=/", "one line of text"),
    ],
)
def test_a_value_that_is_none_is_refused_with_the_variables_name(name: str, value: str, expected: str) -> None:
    """The error names the variable, its value and the accepted values."""
    with pytest.raises(ConfigError, match=rf"^{name} must be .*{expected}"):
        read_environment({name: value})


def test_a_start_may_have_less_than_a_second_and_a_heap_as_little_as_that_of_up() -> None:
    told = read_environment({"TORCHMOOR_START_TIMEOUT_S": "0.5", "TORCHMOOR_HEAP_MIB": "128"})

    assert (told.start_timeout_s, told.heap_mib) == (0.5, 128)


@pytest.mark.parametrize(
    "name", ["TS_INFERENCE_ADDRESS", "TS_MODEL_STORE", "TS_DISABLE_TOKEN_AUTHORIZATION", "TS_TYPO"]
)
def test_what_the_container_decides_itself_cannot_be_set(name: str) -> None:
    """Addresses and stores that the container sets itself are refused, and so are misspelt variables."""
    with pytest.raises(ConfigError, match=rf"^{name} cannot be set here.*TS_JOB_QUEUE_SIZE"):
        read_environment({name: "x"})


@pytest.mark.parametrize("name", ["SAGEMAKER_PROGRAM", "SAGEMAKER_TS_BATCH_SIZE", "SAGEMAKER_TS_MAX_WORKERS"])
def test_what_would_have_no_effect_is_refused_with_what_to_do(name: str) -> None:
    """Variables for AWS's inference.py scripts are refused with advice, because this container does not run scripts."""
    with pytest.raises(ConfigError, match=rf"^{name} is set, and has no effect here: .*leave {name} out"):
        read_environment({name: "1"})
