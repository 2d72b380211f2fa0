"""Settings of endpoints and their variants, and of how requests are routed among instances."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from torchmoor.config.async_inference import AsyncEndpointSettings
from torchmoor.config.group import Count, Positive, SettingsGroup, SharedCount, refusal
from torchmoor.config.scaling import ScalingSettings

ALL_TRAFFIC = "AllTraffic"

_NAME = re.compile(r"(?=.{1,63}$)[a-zA-Z0-9](-*[a-zA-Z0-9])*")


class PrefixAwareSettings(SettingsGroup, title="prefix_aware"):
    """PREFIX_AWARE, with SageMaker's ranges."""

    prefix_length: Annotated[int, Field(ge=1024, le=65_536)] = Field(
        4096, description="Bytes of a body that are compared."
    )
    concurrency_threshold: Annotated[int, Field(ge=1, le=1024)] = Field(
        16, description="Outstanding requests at which an instance counts as full."
    )


class KvAwareSettings(SettingsGroup, title="kv_aware"):
    """KV_AWARE: how prompts are compared, and the weight of a match."""

    max_prompt_bytes: Annotated[int, Field(gt=0, le=1 << 20)] = Field(
        65_536, description="First bytes of a body that are compared."
    )
    block_bytes: Count = Field(512, description="Size of the blocks in which bodies are compared.")
    bytes_per_request: Count = Field(8_192, description="Common bytes that outweigh one more outstanding request.")
    max_blocks_per_instance: Count = Field(
        8_192, description="Blocks remembered per instance; the default is 4 MiB of prompts, about a million tokens."
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max_prompt_bytes < self.block_bytes:
            raise refusal(
                "max_prompt_bytes", f"must be from {self.block_bytes} (block_bytes), not {self.max_prompt_bytes}"
            )
        return self


class AffinitySettings(SettingsGroup, title="affinity"):
    """Requests with one affinity key, such as OpenAI's `prompt_cache_key`, stay on one instance."""

    max_key_bytes: Annotated[int, Field(ge=0, le=1024)] = Field(
        256, description="Longest key; a longer one is ignored and counted. 0: no keys are read."
    )
    free_requests: Count = Field(
        16, description="An instance with fewer outstanding requests than this always keeps its keys."
    )
    load_factor: Annotated[float, Field(ge=1)] = Field(
        1.25, description="A busier instance keeps its keys up to this multiple of the instances' mean load."
    )


class LateBindingSettings(SettingsGroup, title="late_binding"):
    """Requests beyond the instances' capacity wait at the proxy for the instance that is free first."""

    max_waiting: Count = Field(
        1024,
        description="Requests of one variant that may wait for a busy instance. Those that wait for an instance to "
        "start count against max_held of Autoscaling.",
    )
    max_wait_s: Positive = Field(
        30.0,
        description="Longest wait; then the answer is 503. The wait counts towards the time that the client allows "
        "the model.",
    )


class MultiModelSettings(SettingsGroup, title="multi_model"):
    """An endpoint whose requests name one of many models. The instances decide how long they keep a model.

    With the key `adapters`, the models are adapters of the endpoint's own model, which answers requests that name none.
    """

    are_adapters: bool = False  # of the endpoint's own model: the endpoint has `adapters` instead of `multi_model`
    is_cached: bool = True  # models stay in memory, as MultiModelConfig says
    hot_outstanding: SharedCount = Field(
        16, description="Requests for a model at each instance that has it, above which another instance loads it too."
    )
    max_models: Count = Field(20_000, description="Models remembered per instance.")


class VariantSettings(SettingsGroup, title="variant"):
    """One variant of an endpoint: its model, its share of traffic, its routing strategy.

    routing_strategy: checked by the table of strategies when the endpoint is made. scaling: None if its instances are
    not started and stopped on demand.
    """

    model: str
    name: str = ALL_TRAFFIC
    weight: Annotated[float, Field(ge=0)] = 1.0
    routing_strategy: str = Field(
        "LEAST_OUTSTANDING_REQUESTS", description="How an instance is chosen for requests that belong to no session."
    )
    prefix_aware: PrefixAwareSettings = PrefixAwareSettings()
    kv_aware: KvAwareSettings = KvAwareSettings()
    affinity: AffinitySettings = AffinitySettings()
    scaling: ScalingSettings | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return _require_name(name, "variant")

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: str) -> str:
        if not model:
            raise ValueError("must be the name of a model, not ''")
        return model


class EndpointSettings(SettingsGroup, title="endpoint"):
    """One endpoint: the name in the URL, and the variants that share its traffic.

    late_binding: None if requests beyond the capacity are refused at once. multi_model: None if each variant serves one
    model. async_inference: None if InvokeEndpointAsync is refused.
    """

    name: str
    variants: tuple[VariantSettings, ...]
    late_binding: LateBindingSettings | None = None
    multi_model: MultiModelSettings | None = None
    async_inference: AsyncEndpointSettings | None = None

    @property
    def has_many(self) -> bool:
        """True if every request must name one of many models."""
        return self.multi_model is not None and not self.multi_model.are_adapters

    @property
    def has_adapters(self) -> bool:
        """True if requests may name adapters of the endpoint's model."""
        return self.multi_model is not None and self.multi_model.are_adapters

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return _require_name(name, "endpoint")

    @model_validator(mode="after")
    def _check_variants(self) -> Self:
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) != len(names):
            raise refusal("variants", f"of {self.name!r} must be one or more of different names, not {names}")
        if not any(variant.weight for variant in self.variants):
            raise refusal("variants", f"of {self.name!r} must have a weight above 0")
        return self


def _require_name(name: str, kind: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"must be letters, digits and hyphens between them, 63 at most: {name!r} is not a valid {kind} name"
        )
    return name
