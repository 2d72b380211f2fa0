"""Where instances find many models, or the adapters of one: from the command line and the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchmoor.config.container import ContainerSettings
from torchmoor.config.routing import MultiModelSettings
from torchmoor.errors import ConfigError
from torchmoor.wire.handler_variables import ADAPTERS_SOURCE, MODELS_CACHE, MODELS_SOURCE, URL_ROOTS

MANY = "many"  # the archive that serves many models, and so the endpoint
MULTI_MODEL = "SAGEMAKER_MULTI_MODEL"  # SageMaker sets it in a container that must serve the operations on models
PLATFORM_MODELS = "/opt/ml/models"  # where SageMaker puts the models that such a container loads


def multi_model_settings(endpoint: str, environ: Mapping[str, str]) -> MultiModelSettings | None:
    """Return the settings of an endpoint with many models or with adapters, None for another. environ: instances'."""
    if endpoint == MANY:
        return MultiModelSettings(is_cached=environ.get(MODELS_CACHE, "enabled") != "disabled")
    return MultiModelSettings(are_adapters=True) if environ.get(ADAPTERS_SOURCE) else None


def many_environment(endpoints: Sequence[str], models: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the instances of `many`. models: a directory, an S3 prefix or "". Raises ConfigError."""
    if MANY not in endpoints:
        if models:
            raise ConfigError(f"--models is for the endpoint with many models: add --endpoint {MANY}")
        return {}
    environment: dict[str, str] = {}
    if models:
        environment[MODELS_SOURCE] = _find_source("--models", models)
    elif not environ.get(MODELS_SOURCE):
        if not _is_multi_model(environ):
            raise ConfigError(f"--endpoint {MANY} needs --models, a directory or s3://bucket/prefix with the models")
        environment[MODELS_SOURCE] = ""  # the platform loads all models
    if _is_multi_model(environ) and not environ.get(URL_ROOTS):
        environment[URL_ROOTS] = PLATFORM_MODELS
    return environment


def adapter_environment(endpoints: Sequence[str], adapters: str) -> dict[str, str]:
    """Return the instances' variables. adapters: a directory, file://, an S3 prefix, or "". Raises ConfigError."""
    if not adapters:
        return {}
    if MANY in endpoints:
        raise ConfigError(
            f"--adapters needs exactly one endpoint of one model; --endpoint {MANY} has many, which --models names"
        )
    if len(endpoints) != 1:
        raise ConfigError("--adapters needs exactly one endpoint, whose model they belong to")
    return {ADAPTERS_SOURCE: _find_source("--adapters", adapters)}


def read_container(environ: Mapping[str, str], settings: ContainerSettings) -> ContainerSettings:
    """Return a container's settings with the mode that the environment sets. Raises ConfigError."""
    return settings.replace(serves_models=settings.serves_models or _is_multi_model(environ))


def _find_source(option: str, text: str) -> str:
    """Return where instances read models or adapters: an S3 prefix as it is, or a directory. Raises ConfigError."""
    if text.startswith("s3://"):
        if not text.removeprefix("s3://").partition("/")[0]:
            raise ConfigError(f"{option}: {text} names no bucket; the form is s3://bucket/prefix")
        return text
    folder = Path(text.removeprefix("file://")).resolve()
    if not folder.is_dir():
        raise ConfigError(f"{option}: there is no directory {folder}")
    return str(folder)


def parse_flag(text: str) -> bool:
    """Return the value of a variable that is true or false. Raises ValueError, which continues "NAME must be"."""
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def _is_multi_model(environ: Mapping[str, str]) -> bool:
    """Return whether the platform loads the models. Raises ConfigError."""
    text = environ.get(MULTI_MODEL, "").strip()
    try:
        return bool(text) and parse_flag(text)
    except ValueError as error:
        raise ConfigError(f"{MULTI_MODEL} must be {error}, not {text!r}") from None
