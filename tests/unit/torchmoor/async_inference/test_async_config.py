"""AsyncInferenceConfig and the related groups in the configuration file."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.torchmoor.changed_value import with_value
from torchmoor.config.file import parse
from torchmoor.errors import ConfigError

DOCS = Path(__file__).parents[4] / "docs" / "async-inference.md"


def example() -> Any:
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return yaml.safe_load(text)


def changed(path: str, value: object) -> Any:
    """The example with the value at a path like Endpoints.0.EndpointConfig; None deletes it."""
    return with_value(example(), path, value)


def test_example_in_the_docs_is_a_configuration() -> None:
    """The example in the documentation is parsed with every value in its place."""
    proxy = parse(example()).proxy

    config = proxy.endpoints[0].async_inference
    assert (config.output_path, config.failure_path) == ("s3://bucket/results", "s3://bucket/failures")
    assert config.success_topic == "arn:aws:sns:eu-west-1:123456789012:done"
    assert config.max_concurrent_per_instance == 4
    assert proxy.async_inference.queue == "sqlite:///var/lib/torchmoor/queue.db"
    assert proxy.objects.input_prefixes == ("s3://bucket/inputs/",)
    assert [webhook.url for webhook in proxy.notices.webhooks] == ["https://example.com/hook"]


def test_endpoint_without_the_config_is_not_asynchronous() -> None:
    """An endpoint without AsyncInferenceConfig is not asynchronous, as on SageMaker."""
    proxy = parse(changed("Endpoints.0.EndpointConfig.AsyncInferenceConfig", None)).proxy

    assert proxy.endpoints[0].async_inference is None


CONFIG = "Endpoints.0.EndpointConfig.AsyncInferenceConfig"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (f"{CONFIG}.OutputConfig", None, "OutputConfig"),
        (f"{CONFIG}.OutputConfig.S3OutputPath", "ftp://x", "S3OutputPath must match"),
        (f"{CONFIG}.OutputConfig.S3OutputPath", None, "async_inference.output_root"),
        (f"{CONFIG}.OutputConfig.NotificationConfig.SuccessTopic", "no-arn", "SuccessTopic must match"),
        (f"{CONFIG}.OutputConfig.NotificationConfig.ErrorTopic", "arn:aws:sqs:eu-west-1:1:x", "ErrorTopic must match"),
        (f"{CONFIG}.OutputConfig.NotificationConfig.IncludeInferenceResponseIn", ["ODD"], "must be one of"),
        (f"{CONFIG}.ClientConfig.MaxConcurrentInvocationsPerInstance", 1001, "must be 1000 at most"),
        (f"{CONFIG}.Odd", {}, "Odd"),
        ("async_inference.queue", "", "async_inference.queue is missing"),
        ("async_inference.lease_s", 0, "async_inference.lease_s must be positive"),
        ("async_inference.odd", 0, "unknown key 'odd'"),
        ("objects.input_prefixes", "s3://bucket/", "must be a list of texts"),
        ("objects.input_prefixes", [1], "must be a list of texts"),
        ("notices.webhooks", [{"url": "https://x"}], r"notices.webhooks\[0\].secret is missing"),
        ("Endpoints.0.MultiModelConfig", {}, "many models"),
    ],
)
def test_what_is_wrong_is_told_by_its_key(path: str, value: object, words: str) -> None:
    """Each wrong value is refused with its key; none is ignored."""
    with pytest.raises(ConfigError, match=words):
        parse(changed(path, value))


def test_a_queue_with_a_password_comes_from_elsewhere() -> None:
    """The environment's URL replaces the file's, or supplies it where the file has none."""
    for own in ("", "sqlite:///a/file"):
        configuration = parse(changed("async_inference.queue", own), queue="redis://:password@host/0")

        assert configuration.proxy.async_inference.queue == "redis://:password@host/0"


def test_include_without_topic_is_checked_by_name() -> None:
    """IncludeInferenceResponseIn may name a topic that is not configured, as in botocore."""
    content = changed(
        f"{CONFIG}.OutputConfig.NotificationConfig.IncludeInferenceResponseIn", ["ERROR_NOTIFICATION_TOPIC"]
    )

    config = parse(content).proxy.endpoints[0].async_inference

    assert config.include_response_in == ("ERROR_NOTIFICATION_TOPIC",)
