"""Renders docs/configuration.md, and the table of the container's variables, from the settings classes."""

from __future__ import annotations

import inspect

from pydantic import BaseModel

from handlers.settings.handler import HandlerSettings
from torchmoor.config.discovery import DiscoverySettings
from torchmoor.config.endpoint_config import VARIANT_GROUPS
from torchmoor.config.error_texts import allowed_range
from torchmoor.config.instances import InstanceSettings
from torchmoor.config.launcher import LaunchSettings
from torchmoor.config.routing import LateBindingSettings, MultiModelSettings
from torchmoor.config.settings import GROUPS
from torchmoor.container.environment import OVERRIDES, ContainerEnvironment
from torchmoor.wire.handler_variables import ENV_PREFIX

TABLE = ["| key | default | |", "|---|---|---|"]

INTRODUCTION = """# Configuration reference

`python scripts/make_reference.py` writes this page from the settings classes; do not edit it. Unknown keys and values
out of range are refused with the key, the value and what is allowed; `torchmoor serve --config FILE --check` tries a
file. Numbers without an "Allowed" range must be positive where they are sizes, counts or times.

* [The proxy's file](#the-proxys-file), which `torchmoor serve` reads. `torchmoor up` has options for some
  of the settings, and uses the defaults of the others.
* [The handlers' settings](#the-handlers-settings), in an archive or in an instance's environment.
"""
PROXY = """## The proxy's file

YAML. Beside the groups below it has `Endpoints` and `Instances` ([routing.md](routing.md) has an example), `Discovery`
([discovery.md](discovery.md)),
`Autoscaling` ([autoscaling.md](autoscaling.md)), `sessions: {are_journaled: true}` where the instances share a journal,
and `account_id`, which is named in "Endpoint ... of account ... not found.". `EndpointConfig` is what boto3's
`create_endpoint_config` takes, and is checked by botocore's own validator.
"""
HANDLERS = f"""## The handlers' settings

The group `handler:` of an archive's model-config, or the environment of the instance, which takes precedence:
`{ENV_PREFIX}SESSION_TTL_S=600` is `handler.session.ttl_s`. In the environment, commas separate
the items of a list.
"""


def render() -> str:
    """Return docs/configuration.md."""
    parts = [INTRODUCTION, PROXY]
    parts += [make_group(f"`{name}`", kind) for name, kind in GROUPS.items()]
    parts += [
        make_group("An entry of `Instances`", InstanceSettings),
        make_group("An entry of `Discovery`", DiscoverySettings),
        make_group("`launcher`", LaunchSettings),
        *(make_group(f"`{name}` of an endpoint", kind) for name, kind in VARIANT_GROUPS.items()),
        make_group("`late_binding` of an endpoint", LateBindingSettings),
        make_group("`multi_model`, or `adapters`, of an endpoint", MultiModelSettings),
        HANDLERS,
    ]
    for name, field in HandlerSettings.model_fields.items():
        assert isinstance(field.annotation, type)
        parts.append(make_group(f"`handler.{name}`", field.annotation))
    return "\n".join(parts)


def make_group(title: str, kind: type[BaseModel]) -> str:
    """Return a settings model as a heading and a table."""
    lines = [f"### {title}", "", " ".join(inspect.cleandoc(kind.__doc__ or "").split()), "", *TABLE]
    for name, field in kind.model_fields.items():
        if not field.description:  # derived from other keys
            continue
        default = "must be given" if field.is_required() else f"`{_show(field.default)}`"
        limits = allowed_range(field)
        text = (field.description or "").replace("|", r"\|")
        if limits and limits != "positive":
            text = f"{text} Allowed: {limits}.".lstrip()
        lines.append(f"| `{name}` | {default} | {text} |".replace("|  |", "| |"))
    return "\n".join([*lines, ""])


def render_variables() -> str:
    """Return the table of the container's variables."""
    lines = ["| variable | default | |", "|---|---|---|"]
    for key, field in ContainerEnvironment.model_fields.items():
        if field.alias:
            names = ", ".join(f"`{name}`" for name in (field.alias, *OVERRIDES.get(key, ())))
            default = "" if field.default in (None, "") else f"`{_show(field.default)}`"
            lines.append(f"| {names} | {default} | {field.description} |".replace("|  |", "| |"))
    return "\n".join(lines)


def _show(value: object) -> str:
    """Return a default in YAML; large numbers of bytes also in MiB or GiB."""
    match value:
        case bool():
            return str(value).lower()
        case int() if value >= 1 << 20 and value % (1 << 20) == 0:
            return f"{value} ({value >> 30} GiB)" if value % (1 << 30) == 0 else f"{value} ({value >> 20} MiB)"
        case str():
            return value or '""'
        case tuple():
            return f"[{', '.join(map(str, value))}]"
    return str(value)
