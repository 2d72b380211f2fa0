"""Options and environment variables of many models."""

from functools import partial
from pathlib import Path

import pytest

from torchmoor.config.container import ContainerSettings
from torchmoor.config.routing import MultiModelSettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.model_sources import (
    MULTI_MODEL,
    adapter_environment,
    many_environment,
    multi_model_settings,
    read_container,
)
from torchmoor.wire.handler_variables import ADAPTERS_SOURCE, MODELS_CACHE, MODELS_SOURCE, URL_ROOTS


def test_instances_are_told_where_the_models_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source directory is passed as an absolute path, because each instance has its own working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()

    assert many_environment(["many"], "models", {}) == {MODELS_SOURCE: str(tmp_path / "models")}
    assert many_environment(["llava", "many"], "s3://bucket/p", {}) == {MODELS_SOURCE: "s3://bucket/p"}
    assert many_environment(["many"], "", {MODELS_SOURCE: "s3://b"}) == {}
    assert many_environment(["llava"], "", {}) == {}


@pytest.mark.parametrize(
    ("endpoints", "models", "message"),
    [
        (["llava"], "s3://bucket/p", "add --endpoint many"),
        (["many"], "", "--endpoint many needs --models"),
        (["many"], "/nowhere", "there is no directory /nowhere"),
        (["many"], "s3:///prefix", "--models: s3:///prefix names no bucket"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(endpoints: list[str], models: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        many_environment(endpoints, models, {})


def test_in_a_container_the_platform_says_what_is_loaded() -> None:
    """With SAGEMAKER_MULTI_MODEL=true no source is needed, and the platform names the folder of each model."""
    environ = {MULTI_MODEL: "true"}

    assert many_environment(["many"], "", environ) == {MODELS_SOURCE: "", URL_ROOTS: "/opt/ml/models"}
    assert many_environment(["many"], "", {**environ, MODELS_SOURCE: "s3://b", URL_ROOTS: "/x"}) == {}
    assert read_container(environ, ContainerSettings()) == ContainerSettings(serves_models=True)
    assert read_container({}, ContainerSettings()) == ContainerSettings()
    assert read_container({MULTI_MODEL: "false"}, ContainerSettings(max_models=7)) == ContainerSettings(max_models=7)
    assert read_container({}, ContainerSettings(serves_models=True)).serves_models


def test_the_platforms_variable_is_read_in_one_way() -> None:
    """As the container reads its variables: blanks around a value do not count, and other texts are refused."""
    assert read_container({MULTI_MODEL: " True\n"}, ContainerSettings()).serves_models
    assert many_environment(["many"], "", {MULTI_MODEL: " True\n"})[MODELS_SOURCE] == ""
    assert not read_container({MULTI_MODEL: " "}, ContainerSettings()).serves_models
    for read in (partial(many_environment, ["many"], ""), partial(read_container, settings=ContainerSettings())):
        with pytest.raises(ConfigError, match=r"^SAGEMAKER_MULTI_MODEL must be true or false, not 'yes'$"):
            read({MULTI_MODEL: "yes"})


def test_models_that_are_not_kept_are_not_expected_to_be() -> None:
    """The handlers' setting is read, so that it need not be given twice."""
    assert multi_model_settings("many", {}) == MultiModelSettings(is_cached=True)
    assert multi_model_settings("many", {MODELS_CACHE: "disabled"}) == MultiModelSettings(is_cached=False)


def test_adapters_belong_to_the_one_endpoint(tmp_path: Path) -> None:
    found = adapter_environment(["llava"], tmp_path.as_uri())
    assert found == {ADAPTERS_SOURCE: str(tmp_path)}
    assert adapter_environment(["llava"], "s3://bucket/p") == {ADAPTERS_SOURCE: "s3://bucket/p"}
    assert adapter_environment(["llava", "notes"], "") == {}
    assert multi_model_settings("llava", found) == MultiModelSettings(are_adapters=True)
    assert multi_model_settings("llava", {}) is None
    for endpoints, adapters, message in (
        (["llava", "notes"], str(tmp_path), "exactly one endpoint"),
        (["many"], str(tmp_path), "exactly one endpoint"),
        (["llava"], "/nowhere", "there is no directory /nowhere"),
        (["llava"], "s3://", "--adapters: s3:// names no bucket"),
    ):
        with pytest.raises(ConfigError, match=message):
            adapter_environment(endpoints, adapters)
