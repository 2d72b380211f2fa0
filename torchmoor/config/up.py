"""Settings of `torchmoor up`: the endpoints and instances of one host."""

from __future__ import annotations

import ipaddress
import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from torchmoor.config.access import AccessSettings
from torchmoor.config.chat_page import ChatPageSettings
from torchmoor.config.control import ControlSettings
from torchmoor.config.group import SettingsGroup, Texts, like, refusal
from torchmoor.config.launcher import DEFAULT_ENDPOINT, LaunchSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.observe import ObserveSettings
from torchmoor.config.routing import LateBindingSettings, VariantSettings
from torchmoor.config.scaling import ScalingSettings, StepScaling, TargetTracking
from torchmoor.wire.store_urls import JOURNAL_SCHEMES, JOURNAL_URLS, S3_SCHEME

MAX_INSTANCES = 64
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.ASCII | re.IGNORECASE)
_S3_BUCKET = re.compile(r"//[^/]")
_S3_PREFIX = re.compile(r"s3://[a-z0-9][a-z0-9.-]+(/[^\s]*)?")


class UpSettings(SettingsGroup, title="up"):
    """The endpoints that `torchmoor up` serves, each by an archive or a checkpoint, and the groups of its options.

    late_binding: used if is_late_binding. scaling: the policies for a number of instances that changes; its limits
    follow from the numbers of instances.
    """

    endpoints: Texts = Field(
        (DEFAULT_ENDPOINT,),
        description="An endpoint to serve: the name of an archive, without .mar. Repeatable. Without it and without a "
        "MODEL, the demo model is served as llava.",
    )
    checkpoints: Texts = Field(
        (),
        description="Models to serve, each as an endpoint of its own: a checkpoint's directory, s3://bucket/prefix or "
        "hf://owner/name, also hf://owner/name@revision.",
    )
    names: Texts = Field(
        (),
        description="The endpoint name of a MODEL, in the order of the MODELs (default: the last part of its path). "
        "Repeatable.",
    )
    instances: int | None = Field(
        None,
        ge=0,
        le=MAX_INSTANCES,
        description="TorchServe instances per endpoint; with autoscaling, the number at the start (default: "
        "--min-instances, or 1).",
    )
    min_instances: int | None = Field(
        None,
        ge=0,
        le=MAX_INSTANCES,
        description="Least number of instances; enables autoscaling, also down to 0 (docs/autoscaling.md).",
    )
    max_instances: int | None = Field(
        None,
        ge=1,
        le=MAX_INSTANCES,
        description="Largest number of instances; enables autoscaling (default: --instances, or 1).",
    )
    journal: str | None = Field(
        None,
        repr=False,
        description=f"Journal of sessions, with which another instance can continue them: {JOURNAL_URLS}, or off "
        "(default: a directory that is deleted with the fleet). Put a URL with a password into the environment "
        "instead.",
    )
    async_inputs: Texts = Field(
        (), description="A directory below which InputLocation may name files, as file:///a/path. Repeatable."
    )
    async_output: str = Field(
        "",
        description="Where results of asynchronous requests go: s3://bucket/prefix (default: below --run-dir).",
    )
    async_failure: str = Field(
        "",
        description="Where failures of asynchronous requests go: s3://bucket/prefix (default: beside the results).",
    )
    adapters: str = Field(
        "",
        description="Where the LoRA adapters of the one endpoint's model are, each a folder of PEFT: a directory, or "
        "s3://bucket/prefix (docs/adapters.md).",
    )
    models: str = Field("", description="Where the models of --endpoint many are: a directory, or s3://bucket/prefix.")
    allowed_image_hosts: Texts = Field(
        (),
        description="A private host name, address or CIDR block from which images may be downloaded. Repeatable.",
    )
    strategy: str = like(VariantSettings, "routing_strategy")
    is_late_binding: bool = Field(
        False,
        description="Let requests above the capacity wait for the first free instance, instead of refusing them. "
        "Needs a correct --capacity (docs/routing.md).",
    )
    late_binding: LateBindingSettings = LateBindingSettings()
    scaling: ScalingSettings = ScalingSettings()
    launch: LaunchSettings = LaunchSettings()
    listen: ListenSettings = ListenSettings()
    access: AccessSettings = AccessSettings()
    observe: ObserveSettings = ObserveSettings()
    chat_page: ChatPageSettings = ChatPageSettings()
    control: ControlSettings = ControlSettings()

    @field_validator("async_output", "async_failure")
    @classmethod
    def _check_prefix(cls, prefix: str) -> str:
        if prefix and not _S3_PREFIX.fullmatch(prefix):
            raise ValueError(f"must be s3://bucket or s3://bucket/prefix, not {prefix!r}")
        return prefix

    @field_validator("allowed_image_hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _is_host(host):
                raise ValueError(f"must be names, addresses or CIDR blocks, without scheme and port, not {host!r}")
        return hosts

    @field_validator("journal")
    @classmethod
    def _check_journal(cls, journal: str | None) -> str | None:
        # Instances read the rest of it. The error has no part of it, since it may contain a password.
        if journal in (None, "off"):
            return journal
        scheme, colon, place = journal.partition(":")
        has_place = scheme.lower() != S3_SCHEME or _S3_BUCKET.match(place)
        if not colon or scheme.lower() not in JOURNAL_SCHEMES or not has_place:
            raise ValueError(f"must be {JOURNAL_URLS}, or off")
        return journal

    @model_validator(mode="after")
    def _check_instances(self) -> Self:
        """Compare the numbers by the options' names, since `variant_scaling` has those of the configuration file."""
        initial, least, most = self.instances, self.min_instances, self.max_instances
        if least is not None and most is not None and most < least:
            raise refusal("max_instances", f"must be {least} (--min-instances) or more, not {most}")
        if initial is not None and least is not None and initial < least:
            raise refusal("instances", f"must be {least} (--min-instances) or more, not {initial}")
        if initial is not None and most is not None and initial > most:
            raise refusal("instances", f"must be {most} (--max-instances) or less, not {initial}")
        return self

    def variant_scaling(self) -> ScalingSettings | None:
        """Return each variant's limits and policies; None if the number of instances is fixed. Raises ConfigError."""
        initial, least, most = self.instances, self.min_instances, self.max_instances
        if least is None and most is None:
            return None
        if least is None:
            least = 1 if initial is None else min(1, initial)
        tracking, step = self.scaling.tracking or TargetTracking(), self.scaling.step or StepScaling()
        cooldown_s = tracking.scale_in_cooldown_s
        return self.scaling.replace(
            min_capacity=least,
            max_capacity=max(1, least, initial or 0) if most is None else most,
            initial_count=least if initial is None else initial,
            tracking=tracking.replace(scale_out_cooldown_s=min(cooldown_s, tracking.scale_out_cooldown_s)),
            step=step.replace(cooldown_s=min(cooldown_s, step.cooldown_s)),
        )

    @property
    def num_fixed(self) -> int:
        """The number of instances of an endpoint without autoscaling."""
        return 1 if self.instances is None else self.instances


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return _HOST.fullmatch(text) is not None
    return True
